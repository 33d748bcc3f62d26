"""One ratio per device."""

from __future__ import annotations

import math

import pytest

from lightning_accept.latency.capacity import Capacity
from lightning_accept.latency.submodels import Measurement

LAYERS = [Measurement(0, 1, 1.0, 2.0), Measurement(1, 2, 2.0, 4.0), Measurement(2, 3, 3.0, 6.0)]
IMPOSSIBLE = (math.inf, math.inf)


def model_of(central: list[Measurement] = LAYERS) -> Capacity:
    model = Capacity()
    model.prepare(3, [1.0, 2.0, 3.0])
    assert model.spans("here", True) == [(0, 1), (1, 2), (2, 3)]
    model.learn("here", central)
    return model


def test_ratio_of_the_whole() -> None:
    model = model_of()
    spans = model.spans("pi", False)
    assert spans[0] == (0, 3)
    model.learn("pi", [Measurement(first, stop, 10.0, 26.0) for first, stop in spans])
    times = model.times("pi")
    assert (times.forward(0, 1), times.backward(1, 3)) == (pytest.approx(2.0), pytest.approx(20.0))
    assert model.times("here").forward(0, 3) == pytest.approx(6.0)


def test_ratio_of_a_part_where_the_whole_does_not_fit() -> None:
    model = model_of()
    whole, part = model.spans("pi", False)
    here = model.times("here")
    seconds = here.forward(*part) + here.backward(*part)
    model.learn("pi", [Measurement(*whole, *IMPOSSIBLE), Measurement(*part, seconds, 2 * seconds)])
    times = model.times("pi")
    assert times.forward(2, 3) == pytest.approx(9.0)
    assert math.isinf(times.forward(0, 3))


def test_nothing_to_compare() -> None:
    model = model_of()
    model.learn("pi", [Measurement(first, stop, *IMPOSSIBLE) for first, stop in model.spans("pi", False)])
    with pytest.raises(ValueError, match="cannot be compared"):
        model.times("pi")


def test_what_the_central_node_cannot_run_is_unknown_elsewhere() -> None:
    model = model_of([LAYERS[0], Measurement(1, 2, *IMPOSSIBLE), LAYERS[2]])
    assert math.isinf(model.times("here").forward(0, 2))
    assert model.times("here").forward(2, 3) == pytest.approx(3.0)


def test_the_central_node_comes_first() -> None:
    model = Capacity()
    model.prepare(1, [1.0])
    model.learn("pi", [Measurement(0, 1, 1.0, 1.0)])
    with pytest.raises(ValueError, match="central node, which has not been measured"):
        model.times("pi")


def test_observations_scale() -> None:
    model = model_of()
    model.learn("pi", [Measurement(first, stop, 6.0, 12.0) for first, stop in model.spans("pi", False)])
    before = model.times("pi").forward(0, 1)
    for _ in range(10):
        model.observe("pi", Measurement(1, 2, 4.0, 8.0))
    assert model.times("pi").forward(0, 1) == pytest.approx(2 * before, rel=0.05)
    assert model.times("here").forward(0, 1) == pytest.approx(1.0)
