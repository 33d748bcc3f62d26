"""Forecast: a partition and a schedule together, with what they are expected to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_accept.partition.choose import Candidate, Choice, choose_micro_batches, choose_schedule
from lightning_accept.partition.handling import Handling
from lightning_accept.partition.model import PipelineModel
from lightning_accept.partition.plan import Plan, PlanError
from lightning_accept.partition.planner import fixed_partition, plan_partition
from lightning_accept.partition.problem import Problem
from lightning_accept.partition.schedule import Schedule, default_schedule
from lightning_accept.partition.simulator import simulate_period
from lightning_accept.partition.times import ScaledTimes

MAX_IN_FLIGHT = 8


@dataclass(frozen=True)
class Forecast:
    """What was planned.

    Attributes:
        plan: The partition, with seconds, bytes and memory of every stage and link, per batch.
        schedule: Windows and depth.
        period: Seconds per batch that the simulator expects of both together.
        trade: Other schedules: period against staleness.
    """

    plan: Plan
    schedule: Schedule
    period: float
    trade: tuple[Candidate, ...] = ()

    @property
    def starts(self) -> list[int]:
        """First layer of every worker's stage."""
        return list(self.plan.boundaries[1:])

    @property
    def workers(self) -> list[int]:
        """Which workers hold stages, counted from 0 among all that were given."""
        return [device - 1 for device in self.plan.devices[1:]]

    @property
    def speedup(self) -> float | None:
        """Period of the fastest single device over this one; None if no device can hold the model."""
        if self.plan.speedup is None or self.period == 0:
            return None
        return self.plan.speedup * self.plan.period / self.period

    def describe(self, layers: Sequence[str]) -> str:
        """The forecast in one line.

        Args:
            layers: Names of all layers.
        """
        parts = []
        for number, stage in enumerate(self.plan.stages):
            names = layers[stage.first : stage.stop]
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            parts.append(f"stage {number} ({stage.name}): {span}, {stage.seconds:.3g} s")
        text = f"{'; '.join(parts)}; {self.period:.3g} s per batch expected, held up most by {self.plan.bottleneck}"
        if self.speedup is not None:
            text += f", {self.speedup:.2f} times the speed of {self.plan.single} alone"
        text += f"; in flight {self.schedule.in_flight}"
        if self.schedule.micro_batches > 1:
            text += f" in {self.schedule.micro_batches} micro-batches"
        for out in self.plan.left_out:
            text += f"; {out.name} left out: {out.reason}"
        return text


def make_forecast(
    problems: Mapping[int, Problem], *, in_flight: int | None = None, starts: Sequence[int] | None = None
) -> Forecast:
    """Choose partition, depth, windows, backward lag and, among those given, the number of micro-batches.

    Args:
        problems: For every number of micro-batches to consider, the problem with times and bytes of one micro-batch;
            its ``loss_time`` and memory are those of a whole batch.
        in_flight: Batches in flight; None to choose, from 2 on: the synchronous mode is the user's decision.
        starts: First layer of every worker's stage if all workers are to have what they are given; None to choose.

    Raises:
        PlanError: If no partition is possible.
        ValueError: If there are no problems.
    """
    best = _forecast(problems, in_flight, starts)
    if best.plan.left_out:
        # The partition is the best by its busiest part; the simulation may see it otherwise.
        try:
            whole = _forecast(
                {count: replace(problem, may_leave_out=False) for count, problem in problems.items()}, in_flight, starts
            )
        except PlanError:
            return best
        if whole.period < best.period:
            return whole
    return best


def _forecast(problems: Mapping[int, Problem], in_flight: int | None, starts: Sequence[int] | None) -> Forecast:
    plans = {count: _partition(whole_batch(problem, count), starts) for count, problem in problems.items()}
    models = {
        count: PipelineModel.of(problem, plans[count].devices, plans[count].boundaries, count)
        for count, problem in problems.items()
    }
    choice = _schedule(models, in_flight)
    return Forecast(plans[choice.schedule.micro_batches], choice.schedule, choice.period, choice.trade)


def renew_forecast(problem: Problem, forecast: Forecast, *, in_flight: int | None = None) -> Forecast:
    """The same partition and number of micro-batches by what is known now; the schedule is chosen anew.

    Args:
        problem: What is known now, with times and bytes of one micro-batch, as for :func:`make_forecast`.
        forecast: What was planned before.
        in_flight: As for :func:`make_forecast`.

    Raises:
        PlanError: If a device cannot hold or run its share any more.
    """
    count, before = forecast.schedule.micro_batches, forecast.plan
    found = fixed_partition(whole_batch(problem, count), before.boundaries, before.devices)
    model = PipelineModel.of(problem, found.devices, found.boundaries, count)
    choice = _schedule({count: model}, in_flight)
    return Forecast(replace(found, left_out=before.left_out), choice.schedule, choice.period, choice.trade)


def least_period(problem: Problem, micro_batches: int, starts: Sequence[int] | None = None) -> float:
    """Seconds per batch of the best partition's busiest part, which :func:`make_forecast` cannot beat.

    Args:
        problem: As for :func:`make_forecast`.
        micro_batches: Micro-batches per batch.
        starts: As for :func:`make_forecast`.

    Raises:
        PlanError: If no partition is possible.
    """
    return _partition(whole_batch(problem, micro_batches), starts).period


def whole_batch(problem: Problem, count: int) -> Problem:
    """The problem of ``count`` micro-batches together, from that of one."""
    if count == 1:
        return problem
    devices = [
        replace(
            device,
            times=ScaledTimes(device.times, count),
            handling=None if device.handling is None else _scaled(device.handling, count),
        )
        for device in problem.devices
    ]
    return replace(
        problem,
        devices=devices,
        forward_bytes=[count * nbytes for nbytes in problem.forward_bytes],
        backward_bytes=[count * nbytes for nbytes in problem.backward_bytes],
    )


def _partition(problem: Problem, starts: Sequence[int] | None) -> Plan:
    return plan_partition(problem) if starts is None else fixed_partition(problem, [0, *starts])


def _schedule(models: dict[int, PipelineModel], in_flight: int | None) -> Choice:
    if in_flight == 1:
        choices = []
        for count, model in models.items():
            schedule = default_schedule(len(model.stages) - 1, 1, count)
            choices.append(Candidate(schedule, simulate_period(model, schedule)))
        best = min(choices, key=lambda candidate: (candidate.period, candidate.schedule.micro_batches))
        return Choice(best.schedule, best.period, tuple(choices))
    least, most = (2, MAX_IN_FLIGHT) if in_flight is None else (in_flight, in_flight)
    if len(models) > 1:
        return choose_micro_batches(models, max_in_flight=most, min_in_flight=least)
    ((count, model),) = models.items()
    return choose_schedule(model, count, max_in_flight=most, min_in_flight=least)


def _scaled(handling: Handling, count: int) -> Handling:
    return Handling(**{name: [count * seconds for seconds in values] for name, values in vars(handling).items()})
