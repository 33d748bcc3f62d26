"""A discrete-event model of the pipeline: what period, utilisation and staleness a schedule leads to.

Every stage computes one thing at a time, in the strict order of its schedule. A link sends one message at a time per
direction (in half duplex one at a time in all), first come first served; messages on several links share what their
devices can send and receive. The central node follows the training loop:
begin the forwards of a batch, wait for the output of an earlier one, compute its loss, send the gradient, wait for the
gradient of a still earlier one, run its stage-0 backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_accept.partition.model import PipelineModel
from lightning_accept.partition.network import Flow, Network
from lightning_accept.partition.order import Kind, Task, orders, staleness, stashed
from lightning_accept.partition.schedule import Schedule


class Event(NamedTuple):
    """A bar of the timeline.

    Attributes:
        where: ``stage 1`` or, for a transmission, ``link 1 -> 2``.
        kind: ``forward``, ``backward`` or ``loss``; on a link, what the message is.
        batch: Number of the batch.
        micro: Number of the micro-batch within it; 0 for a loss.
        start: Seconds since the first forward began.
        end: When it was done.
    """

    where: str
    kind: Kind
    batch: int
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule leads to.

    Attributes:
        period: Seconds per batch in the steady state.
        stage_utilisation: Share of the time that each stage computes, in the steady state.
        hop_utilisation: Share of the time that each hop transmits activations and gradients, in the steady state. With
            one worker the messages of both hops share one link.
        staleness: How many updates old the weights are in a forward of the steady state, for every stage.
        stashed: Jobs forwarded and not yet backwarded, at most, for every stage.
        losses: When each batch's loss was done, in seconds.
        events: Everything that happened, sorted by start.
    """

    period: float
    stage_utilisation: tuple[float, ...]
    hop_utilisation: tuple[tuple[float, float], ...]
    staleness: tuple[int, ...]
    stashed: tuple[int, ...]
    losses: tuple[float, ...]
    events: tuple[Event, ...]


def simulate(model: PipelineModel, schedule: Schedule, batches: int | None = None) -> Simulation:
    """Run ``batches`` batches and the drain.

    Args:
        model: Seconds per stage and hop.
        schedule: The order of work; its windows must be as many as the model's workers.
        batches: How many; None takes enough to see the steady state.

    Raises:
        ValueError: If the number of windows is wrong or ``batches`` too small to see a steady state.
    """
    run, steady = _steady_run(model, schedule, batches)
    stages, micro = len(model.stages), schedule.micro_batches
    span = steady.end - steady.start
    stage_busy, hop_busy = [0.0] * stages, [[0.0, 0.0] for _ in model.hops]
    for stage, _, _, start, end in run.computed:
        stage_busy[stage] += steady.overlap(start, end)
    for hop, kind, _, start, end in run.transmitted:
        hop_busy[hop][kind == "backward"] += steady.overlap(start, end)
    events = [
        Event(f"stage {stage}", kind, *(divmod(job, micro) if kind != "loss" else (job, 0)), start, end)
        for stage, kind, job, start, end in run.computed
    ]
    for hop, kind, job, start, end in run.transmitted:
        source, target = hop, (hop + 1) % stages
        ends = (source, target) if kind == "forward" else (target, source)
        events.append(Event(f"link {ends[0]} -> {ends[1]}", kind, *divmod(job, micro), start, end))
    return Simulation(
        period=steady.period,
        stage_utilisation=tuple(_share(busy, span) for busy in stage_busy),
        hop_utilisation=tuple((_share(down, span), _share(up, span)) for down, up in hop_busy),
        staleness=tuple(staleness(order, micro, steady.batch) for order in run.orders),
        stashed=tuple(stashed(order) for order in run.orders),
        losses=tuple(run.losses),
        events=tuple(sorted(events, key=lambda event: (event.start, event.end))),
    )


def simulate_period(model: PipelineModel, schedule: Schedule) -> float:
    """Only the period of :func:`simulate`."""
    return _steady_run(model, schedule, None)[1].period


@dataclass
class _Channel:
    """One direction of a link.

    Attributes:
        rivals: Channels that cannot send while this one transmits.
        queue: What is to be sent.
        transmitting: Whether a message is under way.
    """

    rivals: list[_Channel] = field(default_factory=list)
    queue: deque[tuple[int, int, Kind, int]] = field(default_factory=deque)
    transmitting: bool = False


class _Run:
    """One simulation in progress."""

    def __init__(self, model: PipelineModel, schedule: Schedule, batches: int) -> None:
        self._model = model
        self._micro = schedule.micro_batches
        self._last = len(model.stages) - 1
        self.orders = orders(schedule, batches)
        self.computed: list[tuple[int, Kind, int, float, float]] = []
        self.transmitted: list[tuple[int, Kind, int, float, float]] = []
        self.losses: list[float] = []
        self._next = [0] * len(self.orders)
        self._idle = [True] * len(self.orders)
        self._arrived: list[set[Task]] = [set() for _ in self.orders]
        self._outputs = [0] * batches
        self._heap: list[tuple[float, int, str, tuple[int, Kind, int]]] = []
        self._count = 0
        self._channels = self._connect()
        self._network = _network_of(model)
        self._network_plan = 0
        self._run()

    def _connect(self) -> dict[tuple[int, Kind], _Channel]:
        """The channel of every hop and direction; an only worker has one link for both hops."""
        channels: dict[tuple[int, Kind], _Channel] = {}
        for index, hop in enumerate(self._model.hops):
            if index == 1 and self._last == 1:
                channels[1, "forward"], channels[1, "backward"] = channels[0, "backward"], channels[0, "forward"]
                continue
            down, up = _Channel(), _Channel()
            channels[index, "forward"], channels[index, "backward"] = down, up
            if not hop.full_duplex:
                down.rivals.append(up)
                up.rivals.append(down)
        return channels

    def _run(self) -> None:
        for stage in range(len(self.orders)):
            self._begin(stage, 0.0)
        while self._heap:
            now, _, what, (index, kind, job) = heappop(self._heap)
            if what == "computed":
                self._idle[index] = True
                self._emit(index, kind, job, now)
                self._begin(index, now)
            elif what == "arrived":
                self._arrive(index, kind, job, now)
            elif what == "network":
                if index == self._network_plan:  # otherwise something began meanwhile, and it ends at another time
                    self._end_shared(now)
            else:
                channel = self._channels[index, kind]
                channel.transmitting = False
                for candidate in sorted([channel, *channel.rivals], key=_first_in_queue):
                    self._send(candidate, now)
        if any(done < len(order) for done, order in zip(self._next, self.orders, strict=True)):
            raise RuntimeError("the simulated pipeline deadlocked, which no schedule should allow")

    def _begin(self, stage: int, now: float) -> None:
        """Start the stage's next task if it is free and has what it needs."""
        position = self._next[stage]
        if not self._idle[stage] or position == len(self.orders[stage]):
            return
        kind, job = task = self.orders[stage][position]
        if not (stage == 0 and kind == "forward"):
            if task not in self._arrived[stage]:
                return
            self._arrived[stage].remove(task)
        costs = self._model.stages[stage]
        seconds = self._model.loss if kind == "loss" else costs.forward if kind == "forward" else costs.backward
        self._next[stage] = position + 1
        self._idle[stage] = False
        self.computed.append((stage, kind, job, now, now + seconds))
        self._push(now + seconds, "computed", stage, kind, job)

    def _emit(self, stage: int, kind: Kind, job: int, now: float) -> None:
        """Send what a finished task has made to where it is needed."""
        if kind == "loss":
            self.losses.append(now)
            for each in range(job * self._micro, (job + 1) * self._micro):
                self._post(self._last, "backward", each, now)
        elif kind == "forward":
            self._post(stage, "forward", job, now)
        elif stage > 0:
            self._post(stage - 1, "backward", job, now)

    def _post(self, hop: int, kind: Kind, job: int, now: float) -> None:
        """Queue a message; without workers there is no way to go."""
        if not self._channels:
            self._arrive(hop, kind, job, now)
            return
        channel = self._channels[hop, kind]
        self._count += 1
        channel.queue.append((self._count, hop, kind, job))
        self._send(channel, now)

    def _send(self, channel: _Channel, now: float) -> None:
        """Start the channel's next message if nothing is in its way."""
        if not channel.queue or channel.transmitting:
            return
        if any(rival.transmitting for rival in channel.rivals):
            return
        _, hop, kind, job = channel.queue.popleft()
        costs = self._model.hops[hop]
        seconds, bandwidth = costs.forward, costs.forward_bandwidth
        if kind == "backward":
            seconds, bandwidth = costs.backward, costs.backward_bandwidth
        channel.transmitting = True
        if self._network is None or not 0 < bandwidth < float("inf") or seconds == 0:
            self._sent(hop, kind, job, now, now + seconds)
            return
        source, target = (hop, (hop + 1) % (self._last + 1))[:: 1 if kind == "forward" else -1]
        over = (("up", source), ("down", target))
        self._network.begin(Flow((hop, kind, job), seconds * bandwidth, bandwidth, over, now))
        self._plan_network()

    def _sent(self, hop: int, kind: Kind, job: int, start: float, free: float) -> None:
        """A message has left, or will have at ``free``."""
        costs = self._model.hops[hop]
        self.transmitted.append((hop, kind, job, start, free))
        self._push(free, "transmitted", hop, kind, job)
        latency = costs.forward_latency if kind == "forward" else costs.backward_latency
        self._push(free + latency, "arrived", hop, kind, job)

    def _end_shared(self, now: float) -> None:
        """The transmissions that share devices' ways and end now."""
        assert self._network is not None
        for flow in self._network.ended(now):
            self._sent(*flow.tag, flow.start, now)
        self._plan_network()

    def _plan_network(self) -> None:
        """Look when the next of those transmissions ends; what was planned before counts no more."""
        assert self._network is not None
        self._network_plan += 1
        end = self._network.next_end()
        if end is not None:
            self._push(end, "network", self._network_plan, "forward", 0)

    def _arrive(self, hop: int, kind: Kind, job: int, now: float) -> None:
        """Note a message at its stage; the output counts once its whole batch is there."""
        task: Task = (kind, job)
        stage = hop if kind == "backward" else hop + 1
        if stage > self._last:
            batch = job // self._micro
            self._outputs[batch] += 1
            if self._outputs[batch] < self._micro:
                return
            stage, task = 0, ("loss", batch)
        self._arrived[stage].add(task)
        self._begin(stage, now)

    def _push(self, time: float, what: str, index: int, kind: Kind, job: int) -> None:
        self._count += 1
        heappush(self._heap, (time, self._count, what, (index, kind, job)))


def _network_of(model: PipelineModel) -> Network[tuple[int, Kind, int]] | None:
    """What transmissions share; None if devices send and receive without limit."""
    capacities: dict[Hashable, float] = {}
    for number, stage in enumerate(model.stages):
        for name, bandwidth in (("up", stage.uplink), ("down", stage.downlink)):
            if bandwidth < float("inf"):
                capacities[name, number] = bandwidth
    return Network(capacities) if capacities else None


def _first_in_queue(channel: _Channel) -> float:
    return channel.queue[0][0] if channel.queue else float("inf")


@dataclass(frozen=True)
class _Steady:
    """The part of a run without warm-up and drain: its period, when it starts and ends, and its last batch."""

    period: float
    start: float
    end: float
    batch: int

    def overlap(self, start: float, end: float) -> float:
        return max(0.0, min(end, self.end) - max(start, self.start))


def _steady_run(model: PipelineModel, schedule: Schedule, batches: int | None) -> tuple[_Run, _Steady]:
    if len(schedule.windows) != len(model.stages) - 1:
        raise ValueError(
            f"the schedule has windows for {len(schedule.windows)} workers, the pipeline {len(model.stages) - 1}"
        )
    if batches is None:
        batches = 6 * schedule.in_flight + 32
    elif batches < 2 * schedule.in_flight + 4:
        raise ValueError(
            f"{batches} batches show no steady state with {schedule.in_flight} in flight; simulate at least "
            f"{2 * schedule.in_flight + 4}"
        )
    run = _Run(model, schedule, batches)
    return run, _steady(run.losses, batches - schedule.in_flight - 1)


def _steady(losses: list[float], last: int) -> _Steady:
    """Find the cycle that the losses go through before the drain; failing that, average over the second half.

    The cycle must hold in all of the second half: a few equal gaps may be part of a longer cycle.
    """
    half = last // 2
    for cycle in range(1, half // 2 + 1):
        gaps = [losses[index] - losses[index - cycle] for index in range(last - half + cycle, last + 1)]
        if max(gaps) - min(gaps) <= 1e-9 * losses[last]:
            break
    else:
        cycle = half
    start, end = losses[last - cycle], losses[last]
    return _Steady((end - start) / cycle, start, end, last)


def _share(busy: float, span: float) -> float:
    return busy / span if span > 0 else 0.0
