"""What every latency model refuses."""

from __future__ import annotations

import math

import pytest

from lightning_accept.latency.base import check_measured, check_model, check_span
from lightning_accept.latency.submodels import Measurement


def test_model() -> None:
    check_model(2, [1.0, 2.0], [])
    check_model(2, [1.0, 2.0], ["a", "b"])
    with pytest.raises(ValueError, match="at least one layer"):
        check_model(0, [], [])
    with pytest.raises(ValueError, match="2 layers but FLOPs are given for 1"):
        check_model(2, [1.0], [])
    with pytest.raises(ValueError, match="2 layers but 1 names"):
        check_model(2, [1.0, 2.0], ["a"])


def test_measured() -> None:
    one, two = Measurement(0, 1, 1.0, 0.0), Measurement(0, 2, math.inf, math.inf)
    assert check_measured("pi", 2, [(0, 1)], [two, one]) == {(0, 1): one, (0, 2): two}
    with pytest.raises(ValueError, match=r"pi: no measurement of the layers \(1, 2\)"):
        check_measured("pi", 2, [(1, 2)], [one])
    for wrong in (Measurement(0, 1, -1.0, 1.0), Measurement(0, 1, 1.0, math.nan)):
        with pytest.raises(ValueError, match="must not be negative"):
            check_measured("pi", 2, [(0, 1)], [wrong])


@pytest.mark.parametrize("span", [(0, 3), (-1, 1), (1, 1), (2, 1)])
def test_span(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="model of 2 layers"):
        check_span("pi", 2, span)
