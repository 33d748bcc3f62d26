"""Partition and schedule chosen together."""

from __future__ import annotations

import random

import pytest

from lightning_accept.partition.forecast import make_forecast, renew_forecast, whole_batch
from lightning_accept.partition.handling import Handling
from lightning_accept.partition.link import Link
from lightning_accept.partition.plan import PlanError
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.schedule import Schedule
from lightning_accept.partition.times import AdditiveTimes


def problem(
    speeds: tuple[float, ...], link: Link | None = None, layers: int = 6, part: int = 1, **options: object
) -> Problem:
    """Equal layers of 0.1 s forward and 0.2 s backward on a device of speed 1; ``part``: micro-batches."""
    devices = [
        Device(f"d{number}", AdditiveTimes([0.1 / speed / part] * layers, [0.2 / speed / part] * layers))
        for number, speed in enumerate(speeds)
    ]
    crossing = [1000 // part] * (layers + 1)
    one = link or Link()
    return Problem(devices, crossing, crossing, lambda source, target: one, share=True, **options)


def test_plan_and_depth_reach_the_least_period() -> None:
    forecast = make_forecast({1: problem((1.0, 2.0, 1.0))})
    assert forecast.starts == [1, 4]
    assert forecast.workers == [0, 1]
    assert forecast.plan.period == pytest.approx(0.6)
    assert forecast.period <= 1.03 * 0.6
    assert 2 <= forecast.schedule.in_flight <= 4
    assert forecast.speedup == pytest.approx(0.9 / forecast.period)
    assert forecast.schedule in [candidate.schedule for candidate in forecast.trade]


def test_slow_links_take_more_batches_in_flight() -> None:
    near = make_forecast({1: problem((1.0, 1.0, 1.0))})
    far = make_forecast({1: problem((1.0, 1.0, 1.0), Link(8e3 / 0.5, 8e3 / 0.5))})
    assert far.schedule.in_flight > near.schedule.in_flight


def test_depth_and_partition_that_are_given_stay() -> None:
    forecast = make_forecast({1: problem((1.0, 2.0, 1.0))}, in_flight=4, starts=[1, 2])
    assert forecast.schedule.in_flight == 4
    assert forecast.starts == [1, 2]
    assert forecast.plan.bottleneck == "stage 2 (d2)"


def test_synchronous_mode() -> None:
    forecast = make_forecast({1: problem((1.0, 1.0, 1.0))}, in_flight=1)
    assert forecast.schedule == Schedule(1, (1, 1), 0)
    assert forecast.period == pytest.approx(1.8)


def test_micro_batches_are_chosen_for_less_staleness() -> None:
    link = Link(8e3 / 0.5, 8e3 / 0.5)
    whole = make_forecast({1: problem((1.0, 1.0, 1.0), link)})
    both = make_forecast({count: problem((1.0, 1.0, 1.0), link, part=count) for count in (1, 4)})
    assert both.schedule.micro_batches == 4
    assert max(both.schedule.staleness) < max(whole.schedule.staleness)


def test_whole_batch_multiplies_times_and_bytes() -> None:
    handling = Handling([1.0] * 7, [2.0] * 7, [3.0] * 7, [4.0] * 7)
    one = problem((1.0, 1.0), Link(8.0, 8.0, 0.5, 0.25))
    device = one.devices[1]
    one = Problem(
        [one.devices[0], Device("d1", device.times, handling=handling)], one.forward_bytes, one.backward_bytes, one.link
    )
    four = whole_batch(one, 4)
    times = four.devices[1].times
    assert times.forward(0, 2) == pytest.approx(0.8)
    assert times.row(1)[3] == times.table()[1, 3] == pytest.approx(2.4)
    assert four.forward_bytes[3] == 4000
    assert four.devices[1].handles.decode_backward[2] == 16.0
    assert whole_batch(one, 1) is one


def test_a_device_that_slows_the_chain_is_left_out_when_allowed() -> None:
    slow = make_forecast({1: problem((1.0, 1.0, 0.05), may_leave_out=True)})
    assert slow.workers == [0]
    assert "d2 left out" in slow.describe([f"layer{number}" for number in range(6)])


@pytest.mark.parametrize("seed", range(12))
def test_leaving_out_never_makes_the_expected_period_longer(seed: int) -> None:
    """The busiest part of a chain of two may be less busy, and yet the chain of three be faster in the simulation."""
    chance = random.Random(seed)
    speeds = tuple(chance.choice((0.3, 0.5, 0.7, 1.0)) for _ in range(3))
    seconds = chance.choice((0.1, 0.3, 0.6))
    link = Link(8e3 / seconds, 8e3 / seconds, 0.05, 0.05)
    allowed = make_forecast({1: problem(speeds, link, may_leave_out=True)})
    assert allowed.period <= make_forecast({1: problem(speeds, link)}).period


def test_one_worker_has_a_stage_even_if_the_central_node_is_faster_alone() -> None:
    forecast = make_forecast({1: problem((10.0, 0.1), may_leave_out=True)})
    assert forecast.starts == [5]
    assert forecast.speedup is not None
    assert forecast.speedup < 1


def test_a_forecast_is_renewed_by_what_is_known_now() -> None:
    speeds, link = (1.0, 0.05, 1.0), Link(8e3 / 0.5, 8e3 / 0.5)
    before = make_forecast({2: problem(speeds, link, part=2, may_leave_out=True)})
    assert before.workers == [1]
    slower = problem((0.5, 0.05, 1.0), link, part=2, may_leave_out=True)
    renewed = renew_forecast(slower, before)
    assert (renewed.starts, renewed.workers) == (before.starts, before.workers)
    assert renewed.plan.stages[0].seconds == pytest.approx(2 * before.plan.stages[0].seconds)
    assert renewed.period > before.period
    assert (renewed.schedule.micro_batches, renewed.plan.left_out) == (2, before.plan.left_out)
    assert renew_forecast(slower, before, in_flight=3).schedule.in_flight == 3


def test_a_given_partition_that_does_not_fit_is_an_error() -> None:
    small = problem((1.0, 1.0), weight_bytes=[100] * 6)
    tight = Problem(
        [small.devices[0], Device("d1", small.devices[1].times, memory=250)],
        small.forward_bytes,
        small.backward_bytes,
        weight_bytes=[100] * 6,
    )
    assert make_forecast({1: tight}, starts=[4]).starts == [4]
    with pytest.raises(PlanError, match="d1 cannot hold or run layers 2 to 5"):
        make_forecast({1: tight}, starts=[2])


def test_description_names_stages_bottleneck_and_depth() -> None:
    text = make_forecast({1: problem((1.0, 2.0, 1.0))}).describe(list("abcdef"))
    assert "stage 1 (d1): b to d, 0.45 s" in text
    assert "per batch expected, held up most by stage" in text
    assert "times the speed of d1 alone" in text
    assert "in flight" in text
