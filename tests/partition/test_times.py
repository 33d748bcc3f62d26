"""Times of sub-models, additive and one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_accept.partition.times import AdditiveTimes, ScaledTimes, SubModelTimes, TableTimes


def check(times: SubModelTimes) -> None:
    """Table, rows and single answers agree."""
    table = times.table()
    assert table.shape == (times.layers + 1, times.layers + 1)
    for first in range(times.layers + 1):
        assert times.row(first) == pytest.approx(table[first])
        assert table[first, first] == 0
        assert np.isinf(table[first, :first]).all()
        for stop in range(first + 1, times.layers + 1):
            assert times.forward(first, stop) + times.backward(first, stop) == pytest.approx(table[first, stop])


def test_additive() -> None:
    times = AdditiveTimes([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    check(times)
    assert (times.layers, times.forward(1, 3), times.backward(0, 2)) == (3, 5.0, 30.0)


def test_additive_in_one() -> None:
    times = AdditiveTimes([1.0, 2.0])
    check(times)
    assert times.backward(0, 2) == 0


def test_scaled() -> None:
    times = ScaledTimes(AdditiveTimes([1.0, 2.0], [3.0, 4.0]), 2.0)
    check(times)
    assert (times.layers, times.forward(0, 2), times.backward(0, 1)) == (2, 6.0, 6.0)


def test_scaled_one_by_one() -> None:
    factors = np.array([[1.0, 2.0, 3.0], [1.0, 1.0, 4.0], [1.0, 1.0, 1.0]])
    times = ScaledTimes(AdditiveTimes([1.0, 2.0], [3.0, 4.0]), factors)
    check(times)
    assert (times.forward(0, 1), times.forward(0, 2), times.backward(1, 2)) == (2.0, 9.0, 16.0)


def test_table() -> None:
    times = TableTimes.from_function(
        3, lambda first, stop: (float(stop - first), math.inf if stop - first > 2 else 1.0)
    )
    check(times)
    assert times.table()[0].tolist() == [0.0, 2.0, 3.0, math.inf]
    check(TableTimes(np.ones((4, 4))))


def test_table_ignores_what_lies_below_the_diagonal() -> None:
    check(TableTimes([[5.0, 1.0], [math.nan, 7.0]]))


def test_answers_are_the_caller_s_own() -> None:
    for times in (AdditiveTimes([1.0, 2.0]), TableTimes(np.ones((3, 3)))):
        times.table()[:] = -1
        times.row(0)[:] = -1
        check(times)


@pytest.mark.parametrize("seconds", [[], [[1.0]], [-1.0], [math.inf], [math.nan]])
def test_additive_refuses(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="forward times must be"):
        AdditiveTimes(seconds)


def test_additive_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="forward times for 1 layers but backward times for 2"):
        AdditiveTimes([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    "seconds", [[1.0], [[1.0, 2.0]], [[1.0]], [[0.0, -1.0], [0.0, 0.0]], [[0.0, math.nan], [0.0, 0.0]]]
)
def test_table_refuses(seconds: list[object]) -> None:
    with pytest.raises(ValueError, match="forward times must be"):
        TableTimes(seconds)


def test_table_refuses_unequal_shapes() -> None:
    with pytest.raises(ValueError, match="forward times have shape"):
        TableTimes(np.ones((2, 2)), np.ones((3, 3)))
