"""The running factor."""

from __future__ import annotations

import pytest

from lightning_accept.latency.scale import RunningScale


def test_first_observation_does_not_decide_alone() -> None:
    scale = RunningScale(0.1)
    assert (scale.factor, scale.error) == (1.0, 0.1)
    scale.observe(1.0, 2.0)
    assert 1.3 < scale.factor < 1.8


def test_follows_a_change_within_a_few() -> None:
    scale = RunningScale(0.1)
    for _ in range(20):
        scale.observe(2.0, 2.0)
    assert scale.factor == pytest.approx(1.0)
    assert scale.error < 0.01
    for _ in range(6):
        scale.observe(2.0, 6.0)
    assert scale.factor == pytest.approx(3.0, rel=0.2)
    assert scale.error > 0.1


def test_nonsense_is_bounded() -> None:
    scale = RunningScale(0.1)
    scale.observe(1.0, 1e12)
    assert scale.factor <= 30.0
