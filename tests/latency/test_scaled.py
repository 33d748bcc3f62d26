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


def four_layers() -> Measured:
    model = Measured()
    model.prepare(4, [1.0] * 4)
    alone = [Measurement(layer, layer + 1, 1.0, 2.0) for layer in range(4)]
    model.learn("pi", [*alone, Measurement(0, 4, 4.0, 8.0)])
    return model


def test_a_checked_sub_model_takes_what_it_took() -> None:
    model = four_layers()
    model.check("pi", Measurement(1, 3, 3.0, 6.0))
    times = model.times("pi")
    assert (times.forward(1, 3), times.backward(1, 3)) == (pytest.approx(3.0), pytest.approx(6.0))
    # Half in common: half of the correction, in logarithms. Nothing in common: none.
    assert times.forward(1, 2) == pytest.approx(1.5**0.5, rel=1e-3)
    assert times.forward(3, 4) == 1.0
    assert times.table()[0, 1] == 3.0
    model.observe("pi", Measurement(1, 3, 3.0, 6.0))
    assert model.times("pi").forward(1, 3) == pytest.approx(3.0)


def test_checks_count_until_a_device_is_measured_again() -> None:
    model = four_layers()
    for seconds in (9.0, 12.0):
        model.check("pi", Measurement(1, 3, seconds / 3, seconds * 2 / 3))
        assert model.times("pi").table()[1, 3] == pytest.approx(seconds)
    alone = [Measurement(layer, layer + 1, 1.0, 2.0) for layer in range(4)]
    model.learn("pi", [*alone, Measurement(0, 4, 4.0, 8.0)])
    assert model.times("pi").table()[1, 3] == 6.0


def test_observations_scale_what_was_checked() -> None:
    model = four_layers()
    model.check("pi", Measurement(1, 3, 3.0, 6.0))
    for _ in range(20):
        model.observe("pi", Measurement(1, 3, 6.0, 12.0))
    assert model.times("pi").forward(1, 3) == pytest.approx(6.0, rel=0.01)
    assert model.times("pi").forward(3, 4) == pytest.approx(2.0, rel=0.01)


def test_what_a_check_finds_impossible_stays_so() -> None:
    model = four_layers()
    model.check("pi", Measurement(1, 3, math.inf, math.inf))
    times = model.times("pi")
    assert [math.isinf(times.forward(*span)) for span in ((1, 3), (0, 3), (1, 2))] == [True, True, False]


def test_only_learnt_devices_and_real_layers_are_checked() -> None:
    model = four_layers()
    with pytest.raises(ValueError, match="tv: nothing was measured"):
        model.check("tv", Measurement(0, 1, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"no layers \(3, 5\)"):
        model.check("pi", Measurement(3, 5, 1.0, 1.0))


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
