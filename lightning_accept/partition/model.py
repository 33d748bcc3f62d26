"""What the simulator knows of a pipeline: seconds per stage and per hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_accept.partition.link import Link
from lightning_accept.partition.problem import Problem


@dataclass(frozen=True)
class StageModel:
    """Seconds of compute per job (batch or micro-batch), the optimizer's step counted with the backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Hop:
    """Seconds per job on the way between two neighbouring stages.

    Attributes:
        forward: Transmission of the activation; the direction is busy for that long.
        backward: Transmission of the gradient.
        forward_latency: From the end of the transmission to the arrival; keeps nothing busy.
        backward_latency: The same for gradients.
        full_duplex: Whether both directions work at the same time.
        acknowledged: Whether a sender waits one round trip for the answer before it sends the next message.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_latency: float = 0.0
    backward_latency: float = 0.0
    full_duplex: bool = True
    acknowledged: bool = False

    @classmethod
    def over(cls, link: Link, forward_bytes: float, backward_bytes: float) -> Hop:
        """The hop that sends so many bytes per job over ``link``."""
        return cls(
            8.0 * forward_bytes / link.forward_bandwidth,
            8.0 * backward_bytes / link.backward_bandwidth,
            link.forward_latency,
            link.backward_latency,
            link.full_duplex,
            link.acknowledged,
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
    def of(cls, problem: Problem, devices: Sequence[int], boundaries: Sequence[int]) -> PipelineModel:
        """The pipeline of a partition.

        Args:
            problem: Times and bytes of one job: for micro-batches, stated for a micro-batch.
            devices: Index of the device of every stage, as in ``Plan.devices``.
            boundaries: First layer of every stage, as in ``Plan.boundaries``.
        """
        stops = [*boundaries[1:], problem.layers]
        stages = []
        for device, first, stop in zip(devices, boundaries, stops, strict=True):
            times = problem.devices[device].times
            stages.append(StageModel(times.forward(first, stop), times.backward(first, stop)))
        hops: list[Hop] = []
        if len(devices) > 1:
            targets = [*devices[1:], devices[0]]
            links = [problem.link(source, target) for source, target in zip(devices, targets, strict=True)]
            if len(devices) == 2:
                links[1] = links[0].reversed()
            hops = [
                Hop.over(link, problem.forward_bytes[cut], problem.backward_bytes[cut])
                for link, cut in zip(links, stops, strict=True)
            ]
        return cls(tuple(stages), tuple(hops), problem.loss_time)

    def least_period(self, micro_batches: int = 1) -> float:
        """Seconds per batch that no schedule can beat: the busiest stage or link."""
        stages = [micro_batches * (stage.forward + stage.backward) for stage in self.stages]
        stages[0] += self.loss
        if len(self.stages) == 2:
            down, up = ([a.forward, b.backward] for a, b in (self.hops, self.hops[::-1]))
            hops = [_busy(down, up, self.hops[0])]
        else:
            hops = [_busy([hop.forward], [hop.backward], hop) for hop in self.hops]
        return max(*stages, *(micro_batches * seconds for seconds in hops), 0.0)


def _busy(forward: list[float], backward: list[float], hop: Hop) -> float:
    """Seconds per job for which a link is busy with these messages."""
    answers = len(forward) * (hop.forward_latency + hop.backward_latency) if hop.acknowledged else 0.0
    longer = max(sum(forward), sum(backward)) + answers
    return longer if hop.full_duplex else max(sum(forward) + sum(backward), longer)
