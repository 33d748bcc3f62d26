"""Sums of layers' times, and what scaled models share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_accept.latency.measured import Measured
from lightning_accept.latency.scaled import summed
from lightning_accept.latency.submodels import Measurement
from lightning_accept.partition.times import AdditiveTimes

FORWARD, BACKWARD = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])


def test_plain_sum_needs_no_table() -> None:
    times = summed(FORWARD, BACKWARD, [])
    assert isinstance(times, AdditiveTimes)
    assert (times.forward(0, 2), times.backward(1, 3)) == (3.0, 10.0)


def test_together() -> None:
    times = summed(FORWARD, BACKWARD, [], joined=0.8)
    assert times.forward(0, 1) == pytest.approx(1.0)
    assert times.forward(0, 2) == pytest.approx(3.0 * 0.9)
    assert times.backward(0, 3) == pytest.approx(12.0 * 0.8)


def test_impossible_spreads_to_what_holds_it() -> None:
    times = summed(np.array([1.0, math.inf, 3.0]), np.array([1.0, math.inf, 3.0]), [(1, 2)])
    assert [math.isinf(times.forward(*span)) for span in ((0, 1), (0, 2), (1, 3), (2, 3))] == [False, True, True, False]
    assert times.backward(2, 3) == pytest.approx(3.0)


def test_devices_must_be_learnt() -> None:
    model = Measured()
    model.prepare(1, [1.0])
    for ask in (model.times, model.uncertainty):
        with pytest.raises(ValueError, match="pi: nothing was measured"):
            ask("pi")
    with pytest.raises(ValueError, match="pi: nothing was measured"):
        model.observe("pi", Measurement(0, 1, 1.0, 1.0))


def test_prepare_forgets() -> None:
    model = Measured()
    model.prepare(1, [1.0])
    model.learn("pi", [Measurement(0, 1, 1.0, 1.0)])
    model.prepare(1, [1.0])
    with pytest.raises(ValueError, match="nothing was measured"):
        model.times("pi")


def test_useless_reports_are_ignored() -> None:
    model = Measured()
    model.prepare(1, [1.0])
    model.learn("pi", [Measurement(0, 1, 1.0, 1.0)])
    for forward in (0.0, math.inf, math.nan):
        model.observe("pi", Measurement(0, 1, forward, forward))
    assert model.times("pi").forward(0, 1) == 1.0
