"""Choosing windows, backward lag and depth together: the least staleness that is nearly as fast as the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lightning_accept.partition.model import PipelineModel
from lightning_accept.partition.schedule import Schedule, default_schedule
from lightning_accept.partition.simulator import simulate_period

_MOST_JOBS = 32
"""Jobs in flight beyond which more micro-batches are not considered."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and the period that the simulator gives it, in seconds per batch."""

    schedule: Schedule
    period: float


@dataclass(frozen=True)
class Choice:
    """The chosen schedule and what the others would have given.

    Attributes:
        schedule: The choice.
        period: Its seconds per batch.
        trade: For every depth that was tried, the least stale schedule within the tolerance of that depth's best
            period: period against staleness.
    """

    schedule: Schedule
    period: float
    trade: tuple[Candidate, ...]


def choose_schedule(
    model: PipelineModel,
    micro_batches: int = 1,
    max_in_flight: int = 8,
    tolerance: float = 0.03,
    min_in_flight: int = 1,
) -> Choice:
    """The least stale schedule whose period is within ``tolerance`` of the best.

    Least stale: fewest batches in flight (the staleness of stage 0 plus 1), then the least sum over the stages, then
    the smallest windows (memory). Depths are tried from the least on until one reaches the busiest stage or link.

    Args:
        model: Seconds per job of every stage and hop.
        micro_batches: Jobs per batch.
        max_in_flight: Batches in flight at most.
        tolerance: How much longer than the best period is accepted, as a fraction.
        min_in_flight: Batches in flight at least.

    Raises:
        ValueError: If ``max_in_flight`` is below 1 or ``min_in_flight``.
    """
    _check_depths(min_in_flight, max_in_flight)
    workers = len(model.stages) - 1
    trade = []
    fastest = float("inf")
    for in_flight in range(min_in_flight, max_in_flight + 1):
        search = _Search(model, default_schedule(workers, in_flight, micro_batches))
        best = search.fastest()
        fastest = min(fastest, best)
        trade.append(search.least_stale(best * (1 + tolerance)))
        if fastest <= model.least_period(micro_batches) * (1 + 1e-6):
            break
    chosen = next(candidate for candidate in trade if candidate.period <= fastest * (1 + tolerance))
    return Choice(chosen.schedule, chosen.period, tuple(trade))


def choose_micro_batches(
    models: Mapping[int, PipelineModel], max_in_flight: int = 8, tolerance: float = 0.03, min_in_flight: int = 1
) -> Choice:
    """Choose the number of micro-batches as well.

    Args:
        models: For every number of micro-batches to be considered, the pipeline with the times and bytes of one
            micro-batch of that size.
        max_in_flight: As for :func:`choose_schedule`; with many micro-batches fewer, for simulating them takes long.
        tolerance: As for :func:`choose_schedule`.
        min_in_flight: As for :func:`choose_schedule`.

    Returns:
        The least stale choice within ``tolerance`` of the best period; its trade holds that of every number, up to
        the depth from which nothing can be better.

    Raises:
        ValueError: If there are no models, or ``max_in_flight`` is below 1 or ``min_in_flight``.
    """
    if not models:
        raise ValueError("no number of micro-batches to choose from")
    _check_depths(min_in_flight, max_in_flight)
    least = min(model.least_period(micro_batches) for micro_batches, model in models.items())
    trade: list[Candidate] = []
    for in_flight in range(min_in_flight, max_in_flight + 1):
        for micro_batches, model in sorted(models.items()):
            if in_flight == min_in_flight or in_flight * micro_batches <= _MOST_JOBS:
                trade += choose_schedule(model, micro_batches, in_flight, tolerance, in_flight).trade
        if any(candidate.period <= least * (1 + tolerance) for candidate in trade):
            break  # what is deeper is staler
    limit = min(candidate.period for candidate in trade) * (1 + tolerance)
    able = [candidate for candidate in trade if candidate.period <= limit]
    chosen = min(able, key=lambda candidate: _staleness(candidate.schedule))
    return Choice(chosen.schedule, chosen.period, tuple(trade))


def _check_depths(min_in_flight: int, max_in_flight: int) -> None:
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight}")
    if not 1 <= min_in_flight <= max_in_flight:
        raise ValueError(f"min_in_flight must be in 1..{max_in_flight} (max_in_flight), not {min_in_flight}")


def _staleness(schedule: Schedule) -> tuple[int, int]:
    return max(schedule.staleness), sum(schedule.staleness)


class _Search:
    """Local search among the schedules of one depth, every one simulated once at most."""

    def __init__(self, model: PipelineModel, start: Schedule) -> None:
        self._model = model
        self._start = start
        self._periods: dict[Schedule, float] = {}

    def fastest(self) -> float:
        """The shortest period that single steps lead to, from several starts."""

        def cost(schedule: Schedule) -> tuple[float, ...]:
            return self._period(schedule), *_size(schedule)

        return min(self._period(self._descend(start, cost)) for start in _starts(self._model, self._start))

    def least_stale(self, limit: float) -> Candidate:
        """The least stale schedule with a period up to ``limit`` that single steps lead to."""

        def cost(schedule: Schedule) -> tuple[float, ...]:
            return _size(schedule) if self._period(schedule) <= limit else (float("inf"),)

        able = sorted((schedule for schedule, period in self._periods.items() if period <= limit), key=_size)
        lags = {schedule.backward_lag: schedule for schedule in reversed(able)}
        best = min((self._descend(start, cost) for start in lags.values()), key=_size)
        return Candidate(best, self._period(best))

    def _descend(self, schedule: Schedule, cost: Callable[[Schedule], tuple[float, ...]]) -> Schedule:
        """Take improving steps until there is none."""
        while True:
            better = next((step for step in _steps(schedule) if cost(step) < cost(schedule)), None)
            if better is None:
                return schedule
            schedule = better

    def _period(self, schedule: Schedule) -> float:
        """The simulated period without the noise of its last digits, so that equal periods compare equal."""
        if schedule not in self._periods:
            self._periods[schedule] = float(f"{simulate_period(self._model, schedule):.9g}")
        return self._periods[schedule]


def _size(schedule: Schedule) -> tuple[float, ...]:
    """Staleness, then memory; the rest only makes the choice unique."""
    return sum(schedule.staleness), sum(schedule.windows), schedule.backward_lag, *schedule.windows


def _starts(model: PipelineModel, default: Schedule) -> Iterator[Schedule]:
    """The default windows, and those that the round trips ask for, with backward lags about the default."""
    if default.synchronous:
        yield default
        return
    trips = round_trips(model, default.micro_batches)
    options = [default.windows]
    for spare in (0, 1):
        clipped = [max(default.micro_batches, min(trip + spare, default.largest_window)) for trip in trips]
        options.append(tuple(max(clipped[worker:]) for worker in range(len(clipped))))
    for windows in dict.fromkeys(options):
        for lag in range(max(default.backward_lag - 1, 0), min(default.backward_lag + 2, default.in_flight)):
            yield Schedule(default.in_flight, windows, lag, default.micro_batches)


def round_trips(model: PipelineModel, micro_batches: int) -> list[int]:
    """For every worker the window below which the ideal period is out of reach.

    A window of jobs passes in the time that one forward needs over the rest of the chain and back, through its
    backward, to the end of the forward that is a window later.
    """
    period = model.least_period(micro_batches) / micro_batches
    trips: list[int] = []
    away = model.loss
    for stage, hop in zip(model.stages[:0:-1], model.hops[:0:-1], strict=True):
        away += hop.forward + hop.forward_latency + hop.backward + hop.backward_latency
        away += stage.forward + stage.backward
        trips.append(math.ceil(away / period) if period > 0 else 1)
    return trips[::-1]


def _steps(schedule: Schedule) -> Iterator[Schedule]:
    """Neighbours: one window or the first few windows one more or less, the backward lag one more or less, or both."""
    if schedule.synchronous:
        return
    workers = range(len(schedule.windows))
    runs = [range(0), *(range(stop + 1) for stop in workers), *(range(worker, worker + 1) for worker in workers[1:])]
    shifts = [tuple(change * (worker in run) for worker in workers) for run in runs for change in (-1, 1)]
    for shift in dict.fromkeys(shifts):
        windows = tuple(window + change for window, change in zip(schedule.windows, shift, strict=True))
        for lag in (schedule.backward_lag, schedule.backward_lag - 1, schedule.backward_lag + 1):
            try:
                step = Schedule(schedule.in_flight, windows, lag, schedule.micro_batches)
            except ValueError:
                continue
            if step != schedule:
                yield step
