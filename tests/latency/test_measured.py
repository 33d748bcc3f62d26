"""Every layer measured on every device."""

from __future__ import annotations

import math

import pytest

from lightning_accept.latency.measured import Measured
from lightning_accept.latency.submodels import Measurement

ALONE = [Measurement(0, 1, 1.0, 2.0), Measurement(1, 2, 2.0, 4.0)]


def model_of(whole: float, layers: int = 2) -> Measured:
    model = Measured()
    model.prepare(layers, [1.0] * layers)
    model.learn("pi", [*ALONE, Measurement(0, 2, whole / 3, 2 * whole / 3)])
    return model


def test_asks_for_layers_and_the_whole() -> None:
    model = Measured()
    model.prepare(2, [1.0, 1.0])
    assert model.spans("pi", False) == [(0, 1), (1, 2), (0, 2)]
    model.prepare(1, [1.0])
    assert model.spans("pi", True) == [(0, 1)]


def test_the_whole_corrects_the_sum() -> None:
    times = model_of(8.1).times("pi")
    assert times.forward(0, 1) + times.backward(0, 1) == pytest.approx(3.0)
    assert times.forward(0, 2) + times.backward(0, 2) == pytest.approx(8.1)


def test_the_whole_may_not_fit() -> None:
    times = model_of(math.inf).times("pi")
    assert times.forward(1, 2) == 2.0
    assert math.isinf(times.forward(0, 2))


def test_observations_scale_only_their_device() -> None:
    model = model_of(9.0)
    model.learn("other", [*ALONE, Measurement(0, 2, 3.0, 6.0)])
    for _ in range(10):
        model.observe("pi", Measurement(1, 2, 4.0, 8.0))
    assert model.times("pi").forward(0, 1) == pytest.approx(2.0, rel=0.05)
    assert model.times("other").forward(0, 1) == pytest.approx(1.0)
    assert model.uncertainty("pi") != model.uncertainty("other")
    model.learn("pi", [*ALONE, Measurement(0, 2, 3.0, 6.0)])
    assert model.times("pi").forward(0, 1) == pytest.approx(1.0)
