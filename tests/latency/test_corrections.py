"""Factors for all sub-models, from some."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_accept.latency.corrections import corrections

WORK = [1.0, 2.0, 3.0, 4.0]


def test_nothing_known_corrects_nothing() -> None:
    assert (corrections(WORK, {}) == 1.0).all()


def test_what_is_known_is_met() -> None:
    ratios = {(0, 2): 2.0, (1, 4): 0.5, (0, 4): 1.25}
    found = corrections(WORK, ratios)
    for span, ratio in ratios.items():
        assert found[span] == pytest.approx(ratio, rel=1e-6)
    assert (found[np.tril_indices(5)] == 1.0).all()


def test_the_more_alike_the_more_it_counts() -> None:
    found = corrections(WORK, {(1, 4): 2.0})
    assert 1.0 == found[0, 1] < found[1, 2] < found[2, 3] < found[2, 4] < found[1, 4]


def test_layers_without_work_are_alike() -> None:
    found = corrections([0.0] * 3, {(0, 2): 4.0})
    assert found[0, 1] == pytest.approx(2.0)
    assert found[1, 2] == pytest.approx(2.0)
    assert found[2, 3] == 1.0
