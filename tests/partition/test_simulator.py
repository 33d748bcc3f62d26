"""The simulator: known figures, and laws that every run obeys."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest

from lightning_accept.partition.model import Hop, PipelineModel, StageModel
from lightning_accept.partition.schedule import Schedule, default_schedule
from lightning_accept.partition.simulator import Event, Simulation, simulate, simulate_period

IDEAL = 3.02


def equal_stages(workers: int, hop: Hop | None = None, micro_batches: int = 1, loss: float = 0.02) -> PipelineModel:
    """The example of all figures here: forward 1, backward 2, loss 0.02 per batch."""
    stage = StageModel(1.0 / micro_batches, 2.0 / micro_batches)
    return PipelineModel((stage,) * (workers + 1), (hop or Hop(),) * (workers + 1 if workers else 0), loss)


def falling(workers: int, in_flight: int) -> tuple[int, ...]:
    return tuple(in_flight - worker for worker in range(1, workers + 1))


@pytest.mark.parametrize("workers", range(1, 9))
def test_without_delay_the_default_reaches_the_ideal(workers: int) -> None:
    schedule = default_schedule(workers)
    assert simulate_period(equal_stages(workers), schedule) == pytest.approx(IDEAL)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_without_backward_lag_the_backward_chain_is_serial(workers: int) -> None:
    """Periods 5 to 13 for 1 to 5 workers: the whole chain's backward and a forward."""
    schedule = Schedule(workers + 2, falling(workers, workers + 2), 0)
    assert simulate_period(equal_stages(workers), schedule) == pytest.approx(2 * (workers + 1) + 1 + 0.02)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_with_all_lag_in_the_backward_the_forward_chain_is_serial(workers: int) -> None:
    schedule = Schedule(workers + 2, falling(workers, workers + 2), workers + 1)
    assert simulate_period(equal_stages(workers), schedule) == pytest.approx(workers + 1 + 2 + 0.02)


@pytest.mark.parametrize("hop", [Hop(1.0, 1.0), Hop(0.0, 0.0, 1.0, 1.0)])
def test_links_that_take_1(hop: Hop) -> None:
    """Evenly falling windows stay at 4 or more however deep; windows that follow the round trip reach the ideal."""
    model = equal_stages(2, hop)
    for in_flight in range(3, 11):
        periods = [simulate_period(model, Schedule(in_flight, falling(2, in_flight), lag)) for lag in range(in_flight)]
        assert min(periods) >= 4.0 - 1e-9
        if in_flight >= 6:
            assert min(periods) == pytest.approx(4.333, abs=1e-3)
    assert simulate_period(model, Schedule(6, (4, 2), 3)) == pytest.approx(IDEAL)


def test_links_whose_round_trip_takes_3() -> None:
    model = equal_stages(2, Hop(0.0, 0.0, 1.5, 1.5))
    assert simulate_period(model, Schedule(8, (5, 2), 4)) == pytest.approx(IDEAL)


def test_links_that_take_3_each_way_need_a_window_of_3_on_the_last_worker() -> None:
    """Its window must pass in a round trip of 6.02 and a backward and a forward: 9.02 for 2, so 4.51 each."""
    model = equal_stages(2, Hop(0.0, 0.0, 3.0, 3.0))
    assert simulate_period(model, Schedule(10, (6, 2), 5)) == pytest.approx(4.51)
    assert simulate_period(model, Schedule(10, (6, 3), 5)) == pytest.approx(IDEAL)


def test_equal_gaps_within_a_longer_cycle_are_not_the_period() -> None:
    """Batches come 3.02, 3.02 and 9.98 apart, for ever."""
    model = equal_stages(2, Hop(0.0, 0.0, 3.0, 3.0))
    for batches in (None, 81, 82, 300):
        assert simulate(model, Schedule(8, (5, 3), 2), batches).period == pytest.approx(16.02 / 3)


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 2), (2, 4), (4, 8), (2, 1)])
def test_synchronous_idles_as_gpipe_does(workers: int, micro_batches: int) -> None:
    """Idle for (P - 1) / (M + P - 1) of the time, and never stale."""
    schedule = default_schedule(workers, 1, micro_batches)
    result = simulate(equal_stages(workers, micro_batches=micro_batches, loss=0.0), schedule)
    stages = workers + 1
    idle = (stages - 1) / (micro_batches + stages - 1)
    assert result.stage_utilisation == pytest.approx([1 - idle] * stages)
    assert result.period == pytest.approx(3 / (1 - idle))
    assert result.staleness == (0,) * stages


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 2), (2, 2), (3, 2), (4, 2), (1, 4), (3, 4), (4, 8)])
def test_micro_batches_reach_the_ideal_with_the_default(workers: int, micro_batches: int) -> None:
    schedule = default_schedule(workers, None, micro_batches)
    period = simulate_period(equal_stages(workers, micro_batches=micro_batches), schedule)
    assert period == pytest.approx(IDEAL)


def test_the_largest_windows_take_turns_with_the_central_node() -> None:
    """Why the default leaves one job of slack below what is free of deadlock."""
    model = equal_stages(2, micro_batches=4)
    assert simulate_period(model, Schedule(3, (9, 8), 1, 4)) == pytest.approx(3.75)
    assert simulate_period(model, Schedule(3, (8, 7), 1, 4)) == pytest.approx(IDEAL)


def test_latency_keeps_no_link_busy() -> None:
    quick = StageModel(0.1, 0.1)
    model = PipelineModel((quick,) * 3, (Hop(0.5, 0.5, 1.0, 1.0),) * 3)
    assert simulate_period(model, Schedule(28, (18, 9), 14)) == pytest.approx(0.5)


def test_half_duplex_shares_the_medium() -> None:
    quick = StageModel(0.1, 0.1)
    model = PipelineModel((quick,) * 3, (Hop(1.0, 0.5, full_duplex=False),) * 3)
    result = simulate(model, Schedule(14, (10, 5), 7))
    assert result.period == pytest.approx(1.5)
    assert result.hop_utilisation == pytest.approx(np.array([[2 / 3, 1 / 3]] * 3))


def test_both_hops_of_an_only_worker_share_its_link() -> None:
    """Down go the activation (1) and the output's gradient (0.5), up the gradient (1) and the output (0.25)."""
    quick = StageModel(0.1, 0.1)
    model = PipelineModel((quick,) * 2, (Hop(1.0, 1.0), Hop(0.25, 0.5)))
    assert simulate_period(model, Schedule(10, (6,), 5)) == pytest.approx(1.5)


def test_without_workers() -> None:
    result = simulate(equal_stages(0), default_schedule(0))
    assert result.period == pytest.approx(IDEAL)
    assert result.stage_utilisation == pytest.approx((1.0,))
    assert result.hop_utilisation == ()


def random_case(seed: int) -> tuple[PipelineModel, Schedule]:
    """Any pipeline under any schedule that can be built."""
    rng = np.random.default_rng(seed)
    workers, micro_batches = int(rng.integers(0, 5)), int(rng.integers(1, 4))
    duplex, in_flight = rng.random() < 0.6, int(rng.integers(1, 7))
    hops = [
        Hop(*rng.uniform(0, 2, 2), *rng.uniform(0, 2, 2), bool(duplex), bool(rng.random() < 0.5))
        for _ in range(workers + 1 if workers else 0)
    ]
    stages = [StageModel(*rng.uniform(0, 2, 2)) for _ in range(workers + 1)]
    largest = micro_batches if in_flight == 1 else (in_flight - 1) * micro_batches + 1
    windows = sorted(rng.integers(micro_batches, largest + 1, workers).tolist(), reverse=True)
    schedule = Schedule(in_flight, tuple(windows), int(rng.integers(0, in_flight)), micro_batches)
    return PipelineModel(tuple(stages), tuple(hops), float(rng.uniform(0, 1))), schedule


def per_place(result: Simulation) -> dict[str, list[Event]]:
    places: dict[str, list[Event]] = defaultdict(list)
    for event in result.events:
        places[event.where].append(event)
    return places


@pytest.mark.parametrize("seed", range(60))
def test_laws(seed: int) -> None:
    model, schedule = random_case(seed)
    batches, micro, stages = 40, schedule.micro_batches, len(model.stages)
    result = simulate(model, schedule, batches)
    places = per_place(result)
    jobs = {(batch, part) for batch in range(batches) for part in range(micro)}

    for events in places.values():
        for earlier, later in itertools.pairwise(events):
            assert later.start >= earlier.end - 1e-9, "one thing at a time"
    if model.hops and not model.hops[0].full_duplex:
        for source, target in itertools.pairwise([*range(stages), 0]):
            both = sorted(
                places[f"link {source} -> {target}"] + (places[f"link {target} -> {source}"] if stages > 2 else []),
                key=lambda event: (event.start, event.end),
            )
            assert all(later.start >= earlier.end - 1e-9 for earlier, later in itertools.pairwise(both))

    done: dict[tuple[str, int], dict[tuple[int, int], Event]] = {}
    for stage in range(stages):
        for kind in ("forward", "backward"):
            of_kind = [event for event in places[f"stage {stage}"] if event.kind == kind]
            assert sorted((event.batch, event.micro) for event in of_kind) == sorted(jobs), "each job once"
            assert of_kind == sorted(of_kind, key=lambda event: (event.batch, event.micro)), "in order"
            done[kind, stage] = {(event.batch, event.micro): event for event in of_kind}
    loss = {event.batch: event for event in places["stage 0"] if event.kind == "loss"}
    assert sorted(loss) == list(range(batches))
    for batch, part in jobs:
        for stage in range(stages - 1):
            down, up = model.hops[stage], model.hops[stage]
            way = down.forward + down.forward_latency
            assert done["forward", stage + 1][batch, part].start >= done["forward", stage][batch, part].end + way - 1e-9
            way = up.backward + up.backward_latency
            assert (
                done["backward", stage][batch, part].start >= done["backward", stage + 1][batch, part].end + way - 1e-9
            )
        assert loss[batch].start >= done["forward", stages - 1][batch, part].end - 1e-9
        assert done["backward", stages - 1][batch, part].start >= loss[batch].end - 1e-9

    messages = [event for event in result.events if event.where.startswith("link")]
    assert len(messages) == 2 * len(model.hops) * len(jobs), "every message once"
    assert result.losses == tuple(sorted(result.losses))
    assert result.staleness == schedule.staleness
    assert result.stashed == (schedule.in_flight * micro, *schedule.windows)
    assert all(0 <= share <= 1 + 1e-9 for share in itertools.chain(result.stage_utilisation, *result.hop_utilisation))


@pytest.mark.parametrize("seed", range(60, 120))
def test_no_period_beats_the_busiest_part(seed: int) -> None:
    model, schedule = random_case(seed)
    result = simulate(model, schedule, 120)
    assert result.period >= model.least_period(schedule.micro_batches) * (1 - 1e-6)
    busiest = max(itertools.chain(result.stage_utilisation, *result.hop_utilisation))
    assert busiest <= model.least_period(schedule.micro_batches) / result.period + 0.02


def test_the_same_question_gets_the_same_answer() -> None:
    model, schedule = random_case(7)
    assert simulate(model, schedule) == simulate(model, schedule)


class Unchecked(Schedule):
    """A schedule that may deadlock."""

    def __post_init__(self) -> None:
        """Check nothing."""


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("in_flight", [2, 3, 5])
def test_the_bound_on_windows_is_tight(in_flight: int, micro_batches: int) -> None:
    largest = (in_flight - 1) * micro_batches + 1
    model = equal_stages(1, micro_batches=micro_batches)
    for lag in range(in_flight):
        simulate(model, Schedule(in_flight, (largest,), lag, micro_batches))
        with pytest.raises(RuntimeError, match="deadlocked"):
            simulate(model, Unchecked(in_flight, (largest + 1,), lag, micro_batches))
        if micro_batches > 1:
            with pytest.raises(RuntimeError, match="deadlocked"):
                simulate(model, Unchecked(in_flight, (micro_batches - 1,), lag, micro_batches))


def test_refuses_a_schedule_for_other_workers() -> None:
    with pytest.raises(ValueError, match="windows for 3 workers, the pipeline 2"):
        simulate(equal_stages(2), default_schedule(3))


def test_refuses_too_few_batches() -> None:
    with pytest.raises(ValueError, match="5 batches show no steady state with 4 in flight; simulate at least 12"):
        simulate(equal_stages(2), default_schedule(2), batches=5)
