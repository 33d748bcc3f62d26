"""The adaptive update."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lightning_accept.latency.adaptation import Adaptation
from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.estimate import expected, linear_estimate
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.submodels import all_spans
from lightning_accept.latency.training import pretrain


@pytest.fixture
def trained(make_dataset: Callable[..., Dataset]) -> Pretrained:
    return pretrain(make_dataset(), steps=0)


def usual(trained: Pretrained) -> Adaptation:
    spans = all_spans(len(trained.layers))
    rows = [spans.index(span) for span in trained.spans]
    linear = linear_estimate(trained.reference, trained.profiles, rows, trained.reference[rows])
    return Adaptation(linear, expected(trained.reference, linear), trained.calibration)


def test_nothing_observed_changes_nothing(trained: Pretrained) -> None:
    adaptation = usual(trained)
    assert adaptation.logs() == pytest.approx(trained.reference)
    assert 0.0 < adaptation.error() < 0.3


def test_observations_make_certain(trained: Pretrained) -> None:
    adaptation, before = usual(trained), usual(trained).error()
    for row in range(0, len(trained.reference), 2):
        adaptation.observe(row, trained.reference[row])
    assert adaptation.error() < before
    assert adaptation.logs() == pytest.approx(trained.reference)


def test_a_slower_layer_is_found(trained: Pretrained) -> None:
    spans = all_spans(len(trained.layers))
    adaptation = usual(trained)
    slow = np.array([0.2, 0.2])
    for span in ((2, 3), (2, 4), (1, 3), (0, 2), (3, 6), (4, 7)):
        row = spans.index(span)
        share = trained.profiles[0].features[row, 2]
        adaptation.observe(row, trained.reference[row] + share * slow)
    change = adaptation.logs() - trained.reference
    assert change[spans.index((2, 3))].mean() > 0.1
    assert np.abs(change[spans.index((5, 7))]).max() < 0.05


def test_one_outlier_is_not_believed(trained: Pretrained) -> None:
    adaptation = usual(trained)
    adaptation.observe(3, trained.reference[3])
    before = adaptation.logs().copy()
    adaptation.observe(3, trained.reference[3] + 2.0)
    assert (adaptation.logs() == before).all()
    adaptation.observe(3, trained.reference[3])
    assert adaptation.logs() == pytest.approx(before, abs=0.02)


def test_a_device_that_has_slowed_down_is_believed_the_second_time(trained: Pretrained) -> None:
    adaptation = usual(trained)
    for _ in range(20):
        adaptation.observe(3, trained.reference[3])
    for _ in range(3):
        adaptation.observe(3, trained.reference[3] + 1.1)
    change = adaptation.logs() - trained.reference
    assert change[3] == pytest.approx([1.1, 1.1], abs=0.05)
    assert change.mean() == pytest.approx(1.1, abs=0.15)
    assert adaptation.error() > 0.1


def test_reports_of_noise_average_out(trained: Pretrained) -> None:
    adaptation, random = usual(trained), np.random.default_rng(0)
    for _ in range(500):
        adaptation.observe(3, trained.reference[3] + random.normal(0, 0.05, 2))
    assert np.abs(adaptation.logs() - trained.reference).mean() < 0.05
