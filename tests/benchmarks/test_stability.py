"""The stability benchmark against what is known in closed form."""

from __future__ import annotations

import math

import pytest
import stability


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_delayed_gradient_descent_has_its_known_limit(staleness: int) -> None:
    # Roots of z^(d + 1) - z^d + a = 0 are within the unit circle up to a = 2 sin(pi / (4 d + 2)).
    expected = 2 * math.sin(math.pi / (4 * staleness + 2))
    for predict in (False, True):  # without momentum there is nothing to predict by
        limit = stability.largest_stable(0.0, staleness, predict, 400, steps=1500)
        assert limit == pytest.approx(expected, rel=0.03)


def test_weight_prediction_allows_twice_the_learning_rate() -> None:
    plain, predicted = (stability.largest_stable(0.9, 3, predict, 200, steps=1500) for predict in (False, True))
    assert predicted > 1.9 * plain
