"""What the simulator knows of a pipeline: seconds per stage and per hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_accept.partition.link import Link
from lightning_accept.partition.problem import Problem


@dataclass(frozen=True)
class StageModel:
    """One stage.

    Attributes:
        forward: Seconds of compute per job (batch or micro-batch).
        backward: Seconds of compute per job, the optimizer's step counted with it.
        uplink: Bits per second that the stage's device sends at most, to all others together.
        downlink: Bits per second that it receives at most.
    """

    forward: float
    backward: float
    uplink: float = float("inf")
    downlink: float = float("inf")


@dataclass(frozen=True)
class Hop:
    """Seconds per job on the way between two neighbouring stages.

    Attributes:
        forward: Transmission of the activation; the direction is busy for that long.
        backward: Transmission of the gradient.
        forward_latency: From the end of the transmission to the arrival; keeps nothing busy.
        backward_latency: The same for gradients.
        full_duplex: Whether both directions work at the same time.
        forward_bandwidth: Bits per second at which ``forward`` is meant; matters where devices' ways are shared.
        backward_bandwidth: The same for ``backward``.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_latency: float = 0.0
    backward_latency: float = 0.0
    full_duplex: bool = True
    forward_bandwidth: float = float("inf")
    backward_bandwidth: float = float("inf")

    @classmethod
    def over(cls, link: Link, forward_bytes: float, backward_bytes: float) -> Hop:
        """The hop that sends so many bytes per job over ``link``."""
        return cls(
            8.0 * forward_bytes / link.forward_bandwidth,
            8.0 * backward_bytes / link.backward_bandwidth,
            link.forward_latency,
            link.backward_latency,
            link.full_duplex,
            link.forward_bandwidth,
            link.backward_bandwidth,
        )


@dataclass(frozen=True)
class PipelineModel:
    """A pipeline as the simulator sees it.

    Attributes:
        stages: Stage 0 on the central node, then the workers.
        hops: One from every stage to the next, then the one from the last worker back to the central node, whose
            forward direction carries the output and whose backward direction carries its gradient. Empty without
            workers. With one worker both hops share the same link.
        loss: Seconds per batch that the central node spends on the loss.
    """

    stages: tuple[StageModel, ...]
    hops: tuple[Hop, ...]
    loss: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a wrong number of hops and negative times."""
        workers = len(self.stages) - 1
        if workers < 0:
            raise ValueError("a pipeline has at least stage 0")
        if len(self.hops) != (workers + 1 if workers else 0):
            raise ValueError(f"{workers} workers need {workers + 1 if workers else 0} hops, not {len(self.hops)}")
        if workers == 1 and self.hops[0].full_duplex != self.hops[1].full_duplex:
            raise ValueError("with one worker both hops are the same link: full_duplex must be equal")
        times = [self.loss]
        times += [seconds for stage in self.stages for seconds in (stage.forward, stage.backward)]
        for hop in self.hops:
            times += [hop.forward, hop.backward, hop.forward_latency, hop.backward_latency]
        if not all(0 <= seconds < float("inf") for seconds in times):
            raise ValueError("times must be finite and not negative")

    @classmethod
    def of(
        cls, problem: Problem, devices: Sequence[int], boundaries: Sequence[int], micro_batches: int = 1
    ) -> PipelineModel:
        """The pipeline of a partition.

        Args:
            problem: Times and bytes of one job: for micro-batches, stated for a micro-batch.
            devices: Index of the device of every stage, as in ``Plan.devices``.
            boundaries: First layer of every stage, as in ``Plan.boundaries``.
            micro_batches: Jobs per batch, all of whose outputs the loss needs.
        """
        stops = [*boundaries[1:], problem.layers]
        stages: list[StageModel] = []
        loss = problem.loss_time
        for device, first, stop in zip(devices, boundaries, stops, strict=True):
            times, handles = problem.devices[device].times, problem.devices[device].handles
            forward, backward = times.forward(first, stop), times.backward(first, stop)
            if len(devices) > 1:
                forward += handles.encode_forward[stop]
                backward += handles.decode_backward[stop]
            if stages:
                forward += handles.decode_forward[first]
                backward += handles.encode_backward[first]
            elif len(devices) > 1:
                loss += micro_batches * (handles.decode_forward[-1] + handles.encode_backward[-1])
            place = problem.devices[device]
            stages.append(StageModel(forward, backward, place.uplink, place.downlink))
        hops: list[Hop] = []
        if len(devices) > 1:
            targets = [*devices[1:], devices[0]]
            links = [problem.way(source, target) for source, target in zip(devices, targets, strict=True)]
            if len(devices) == 2:
                links[1] = links[0].reversed()
            hops = [
                Hop.over(link, problem.forward_bytes[cut], problem.backward_bytes[cut])
                for link, cut in zip(links, stops, strict=True)
            ]
        return cls(tuple(stages), tuple(hops), loss)

    def least_period(self, micro_batches: int = 1) -> float:
        """Seconds per batch that no schedule can beat: the busiest stage or link."""
        stages = [micro_batches * (stage.forward + stage.backward) for stage in self.stages]
        stages[0] += self.loss
        if len(self.stages) == 2:
            down, up = ([a.forward, b.backward] for a, b in (self.hops, self.hops[::-1]))
            hops = [_busy(down, up, self.hops[0])]
        else:
            hops = [_busy([hop.forward], [hop.backward], hop) for hop in self.hops]
        shared = [seconds for stage in range(len(self.stages)) for seconds in self._network(stage)]
        return max(*stages, *(micro_batches * seconds for seconds in (*hops, *shared)), 0.0)

    def _network(self, stage: int) -> tuple[float, float]:
        """Seconds per job for which the device of ``stage`` sends, and for which it receives."""
        if not self.hops:
            return 0.0, 0.0
        ahead, behind = self.hops[stage], self.hops[stage - 1]
        sent = _bits(ahead.forward, ahead.forward_bandwidth) + _bits(behind.backward, behind.backward_bandwidth)
        taken = _bits(behind.forward, behind.forward_bandwidth) + _bits(ahead.backward, ahead.backward_bandwidth)
        return sent / self.stages[stage].uplink, taken / self.stages[stage].downlink


def _bits(seconds: float, bandwidth: float) -> float:
    """Bits of a transmission; none count where the bandwidth has no limit."""
    return seconds * bandwidth if bandwidth < float("inf") else 0.0


def _busy(forward: list[float], backward: list[float], hop: Hop) -> float:
    """Seconds per job for which a link is busy with these messages."""
    return max(sum(forward), sum(backward)) if hop.full_duplex else sum(forward) + sum(backward)
