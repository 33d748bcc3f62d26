"""From h to all sub-models."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.estimate import expected, linear_estimate, log_times, network_input, span_masks
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.submodels import Measurement, all_spans
from lightning_accept.latency.training import pretrain


@pytest.fixture
def trained(make_dataset: Callable[..., Dataset]) -> Pretrained:
    return pretrain(make_dataset(), steps=0)


def rows_of(trained: Pretrained) -> list[int]:
    spans = all_spans(len(trained.layers))
    return [spans.index(span) for span in trained.spans]


def test_log_times() -> None:
    logs = log_times(
        [Measurement(0, 1, 1.0, math.e), Measurement(0, 2, math.inf, math.inf), Measurement(0, 1, 2.0, 0.0)]
    )
    assert logs[0] == pytest.approx([0.0, 1.0])
    assert np.isnan(logs[1]).all()
    assert logs[2] == pytest.approx([math.log(2.0), math.log(0.002)])
    assert log_times([]).shape == (0, 2)


def test_masks() -> None:
    assert torch.equal(span_masks(2), torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))


def test_a_usual_device_is_the_reference_at_its_level(trained: Pretrained) -> None:
    rows = rows_of(trained)
    linear = linear_estimate(trained.reference, trained.profiles, rows, trained.reference[rows] + math.log(3.0))
    assert linear.level == pytest.approx(math.log(3.0))
    assert not linear.unusual
    everywhere = expected(trained.reference, linear)
    assert everywhere == pytest.approx(trained.reference + math.log(3.0))


def test_an_unlike_device_is_allowed_to_be_so(trained: Pretrained) -> None:
    rows = rows_of(trained)
    odd = trained.reference[rows] + np.random.default_rng(0).normal(0, 1.5, (len(rows), 2))
    linear = linear_estimate(trained.reference, trained.profiles, rows, odd)
    assert linear.unusual
    usual = linear_estimate(trained.reference, trained.profiles, rows, trained.reference[rows])
    assert (linear.spread().mean(0) > 1.5 * usual.spread().mean(0)).all()


def test_network_input_fills_what_is_missing(trained: Pretrained) -> None:
    rows = rows_of(trained)
    logs = trained.reference[rows[:-1]] + 1.0
    inputs = network_input(trained.reference, rows, rows[:-1], logs, trained.reference + 1.0)
    assert inputs == pytest.approx(np.zeros(2 * len(rows)))
