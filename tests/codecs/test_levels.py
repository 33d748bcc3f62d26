from __future__ import annotations

import numpy as np
import pytest

from lightning_accept.codecs.levels import SAMPLE, initial_free_levels, signed_order, signed_table, signed_update


def squared_error(values: np.ndarray, levels: np.ndarray) -> float:
    return float((np.abs(values[:, None] - levels).min(1) ** 2).mean())


@pytest.mark.parametrize("a", [[2.0, 1.0], [1.0, 2.0], [1.0, 1.0], [-1.0, 3.0, 0.5], [0.0, 0.0], [1.0, 0.9, 0.8, 0.7]])
def test_deltas_lead_to_the_nearest_level(a: list[float]) -> None:
    """Also where a is not in descending order, negative, or makes levels coincide."""
    coefficients = np.array(a)
    thresholds, deltas, codes = signed_order(coefficients)
    table = signed_table(coefficients.astype(np.float32), 0.0)
    assert len(thresholds) % 3 == 0
    assert sorted(codes) == list(range(len(table)))
    for x in np.linspace(-5, 5, 1001):
        code = codes[0]
        for threshold, delta in zip(thresholds, deltas, strict=True):
            if x >= threshold:
                code ^= delta
        assert abs(x - table[code]) == pytest.approx(np.abs(x - table).min(), abs=1e-6)


def test_a_singular_solve_shares_the_value_and_loses_nothing() -> None:
    codes = np.arange(4, dtype=np.uint8)
    a, bias, error = signed_update(2, codes, np.array([0.0, 0, 0, 10]), np.array([0.0, 0, 0, 30]), 90.0)
    np.testing.assert_allclose(a, [1.5, 1.5], rtol=1e-6)
    assert bias == pytest.approx(0, abs=1e-6)
    assert error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("count", "known"), [(2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497)])
def test_initial_levels_are_close_to_the_best_known_for_a_gaussian(count: int, known: float) -> None:
    """Max, Quantizing for minimum distortion (1960), table I."""
    values = np.random.default_rng(0).standard_normal(50000).astype(np.float32)
    levels = initial_free_levels(values, count)
    assert (np.diff(levels) >= 0).all()
    assert squared_error(values, levels) < 1.03 * known


def test_initial_levels_find_the_values_where_there_are_few() -> None:
    values = np.repeat(np.array([0, 1, 5, 100], np.float32), [9000, 300, 20, 3])
    np.testing.assert_allclose(initial_free_levels(values, 4), [0, 1, 5, 100])


def test_the_sample_is_not_in_step_with_rows() -> None:
    values = np.tile(np.arange(64, dtype=np.float32), 4 * SAMPLE // 64)
    assert squared_error(values[:64], initial_free_levels(values, 2)) < 1.05 * squared_error(
        values[:64], np.array([15.5, 47.5])
    )


def test_constant_values_make_equal_levels() -> None:
    assert initial_free_levels(np.full(300, 2.5, np.float32), 4).tolist() == [2.5] * 4
