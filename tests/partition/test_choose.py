"""The choice of a schedule, against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_accept.partition.choose import choose_micro_batches, choose_schedule
from lightning_accept.partition.model import Hop, PipelineModel, StageModel
from lightning_accept.partition.schedule import Schedule
from lightning_accept.partition.simulator import simulate_period


def equal_stages(workers: int, hop: Hop, micro_batches: int = 1) -> PipelineModel:
    stage = StageModel(1.0 / micro_batches, 2.0 / micro_batches)
    return PipelineModel((stage,) * (workers + 1), (hop,) * (workers + 1), 0.02)


def every_schedule(workers: int, micro_batches: int, max_in_flight: int) -> list[Schedule]:
    schedules = [Schedule(1, (micro_batches,) * workers, 0, micro_batches)]
    for in_flight in range(2, max_in_flight + 1):
        sizes = range((in_flight - 1) * micro_batches + 1, micro_batches - 1, -1)
        for windows in itertools.combinations_with_replacement(sizes, workers):
            schedules += [Schedule(in_flight, windows, lag, micro_batches) for lag in range(in_flight)]
    return schedules


def test_finds_the_schedule_for_links_that_take_1() -> None:
    choice = choose_schedule(equal_stages(2, Hop(0.0, 0.0, 1.0, 1.0)))
    assert choice.schedule == Schedule(6, (4, 2), 3)
    assert choice.period == pytest.approx(3.02)
    assert [candidate.schedule.in_flight for candidate in choice.trade] == [1, 2, 3, 4, 5, 6]


def test_finds_the_ideal_for_links_that_take_3() -> None:
    choice = choose_schedule(equal_stages(2, Hop(0.0, 0.0, 3.0, 3.0)), max_in_flight=12)
    assert choice.schedule == Schedule(10, (6, 3), 5)
    assert choice.period == pytest.approx(3.02)


@pytest.mark.parametrize("seed", range(6))
def test_equals_trying_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workers, micro_batches = [(1, 1), (2, 1), (2, 1), (3, 1), (1, 2), (2, 2)][seed]
    hops = [
        Hop(*rng.uniform(0, 1.5, 2), *rng.uniform(0, 1, 2), True, bool(rng.random() < 0.5)) for _ in range(workers + 1)
    ]
    model = PipelineModel(tuple(StageModel(*rng.uniform(0.3, 2, 2)) for _ in range(workers + 1)), tuple(hops), 0.05)
    periods = {schedule: simulate_period(model, schedule) for schedule in every_schedule(workers, micro_batches, 4)}
    limit = min(periods.values()) * 1.03
    least = min(
        (schedule.in_flight, sum(schedule.staleness), sum(schedule.windows))
        for schedule, period in periods.items()
        if period <= limit
    )
    choice = choose_schedule(model, micro_batches, max_in_flight=4)
    chosen = choice.schedule
    assert choice.period <= limit * (1 + 1e-6)
    assert (chosen.in_flight, sum(chosen.staleness), sum(chosen.windows)) == least


def test_depth_is_limited() -> None:
    model = equal_stages(2, Hop(0.0, 0.0, 3.0, 3.0))
    assert choose_schedule(model, max_in_flight=1).schedule == Schedule(1, (1, 1), 0)
    assert choose_schedule(model, max_in_flight=3).schedule.in_flight <= 3
    with pytest.raises(ValueError, match="max_in_flight must be at least 1, not 0"):
        choose_schedule(model, max_in_flight=0)


def test_without_workers_nothing_is_gained_by_asynchrony() -> None:
    model = PipelineModel((StageModel(1.0, 2.0),), (), 0.02)
    assert choose_schedule(model).schedule.synchronous


def test_an_instant_pipeline() -> None:
    model = PipelineModel((StageModel(0.0, 0.0),) * 3, (Hop(),) * 3)
    assert choose_schedule(model).schedule.synchronous


def test_micro_batches_cut_staleness_on_slow_links() -> None:
    hop = Hop(0.0, 0.0, 1.0, 1.0)
    models = {count: equal_stages(2, hop, count) for count in (1, 4)}
    choice = choose_micro_batches(models)
    assert choice.schedule.micro_batches == 4
    assert max(choice.schedule.staleness) < max(choose_schedule(models[1]).schedule.staleness)
    assert {candidate.schedule.micro_batches for candidate in choice.trade} == {1, 4}
    with pytest.raises(ValueError, match="no number of micro-batches"):
        choose_micro_batches({})


def test_the_same_question_gets_the_same_answer() -> None:
    model = equal_stages(2, Hop(0.3, 0.2, 0.1, 0.1, False))
    assert choose_schedule(model) == choose_schedule(model)
