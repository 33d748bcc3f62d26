"""What counts as a change of a device, and what as noise."""

from __future__ import annotations

import random

import pytest

from lightning_accept.pipeline.messages import StageReport
from lightning_accept.pipeline.watch import StageWatch


def report(seconds: float) -> StageReport:
    return StageReport(seconds / 3, 2 * seconds / 3, 0.01)


def window(watch: StageWatch, seconds: float, count: int = 10, stage: int = 1) -> None:
    for _ in range(count):
        watch.note({stage: report(seconds)})


def test_first_window_sets_what_is_expected() -> None:
    watch = StageWatch()
    window(watch, 0.3)
    medians, changes = watch.look(0.25)
    assert medians[1].seconds == pytest.approx(0.3)
    assert medians[1].step == pytest.approx(0.01)
    assert changes == []


@pytest.mark.parametrize(
    ("seconds", "changed"), [(0.3, False), (0.37, False), (0.38, True), (0.25, False), (0.23, True)]
)
def test_threshold_is_relative_in_both_directions(seconds: float, changed: bool) -> None:
    watch = StageWatch()
    window(watch, 0.3)
    watch.look(0.25)
    window(watch, seconds)
    _, changes = watch.look(0.25)
    assert bool(changes) is changed
    if changed:
        assert (changes[0].stage, changes[0].expected) == (1, pytest.approx(0.3))
        assert changes[0].ratio == pytest.approx(seconds / 0.3)


def test_slow_drift_is_followed_and_is_no_change() -> None:
    watch = StageWatch()
    for step in range(30):
        window(watch, 0.3 * 1.05**step)
        assert watch.look(0.25)[1] == []


def test_single_hiccups_are_no_change() -> None:
    watch = StageWatch()
    window(watch, 0.3)
    watch.look(0.25)
    window(watch, 0.3, 7)
    window(watch, 30.0, 3)
    assert watch.look(0.25)[1] == []


def test_noise_of_a_fifth_is_no_change() -> None:
    watch, rng = StageWatch(), random.Random(0)
    for _ in range(500):
        for _ in range(20):
            watch.note({stage: report(rng.uniform(0.8, 1.2)) for stage in range(3)})
        assert watch.look(0.25)[1] == []


def test_restart_forgets_one_stage_or_all() -> None:
    watch = StageWatch()
    for stage in (1, 2):
        window(watch, 0.3, stage=stage)
    watch.look(0.25)
    watch.restart(1)
    for stage in (1, 2):
        window(watch, 0.9, stage=stage)
    assert [change.stage for change in watch.look(0.25)[1]] == [2]
    watch.restart()
    window(watch, 9.0)
    assert watch.look(0.25)[1] == []


def test_a_stage_without_news_is_left_out() -> None:
    watch = StageWatch()
    window(watch, 0.3)
    watch.look(0.25)
    assert watch.look(0.25) == ({}, [])
