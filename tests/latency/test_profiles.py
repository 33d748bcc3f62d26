"""How profiles vary."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_accept.latency.profiles import Field, Profiles, fit_profiles, profile_features
from lightning_accept.latency.submodels import all_spans

LAYERS = 5
SPANS = all_spans(LAYERS)


def features() -> np.ndarray:
    alone = np.arange(1.0, LAYERS + 1)
    reference = np.log([alone[first:stop].sum() for first, stop in SPANS])
    return profile_features(reference, LAYERS)


def test_features_are_shares_of_the_time() -> None:
    own = features()
    assert own[SPANS.index((1, 3))] == pytest.approx([0, 2 / 5, 3 / 5, 0, 0, 1 / 4])
    assert own[:, :LAYERS].sum(1) == pytest.approx(1.0)


def test_one_layer() -> None:
    assert profile_features(np.array([-3.0]), 1) == pytest.approx(np.array([[1.0, 0.0]]))


def test_conditioning_in_parts_equals_conditioning_at_once() -> None:
    random = np.random.default_rng(0)
    root = random.normal(size=(LAYERS + 1, LAYERS + 1))
    profiles = Profiles(features(), root @ root.T, 0.1)
    seen = random.normal(size=6)
    rows = [0, 3, 5, 7, 9, 14]
    once = profiles.condition(profiles.start(), rows, seen)
    parts = profiles.condition(profiles.condition(profiles.start(), rows[:2], seen[:2]), rows[2:], seen[2:])
    assert parts.mean == pytest.approx(once.mean)
    assert parts.covariance == pytest.approx(once.covariance)
    assert (profiles.spread(once) <= profiles.spread(profiles.start()) + 1e-12).all()


def test_evidence_is_the_normal_density() -> None:
    profiles = Profiles(np.array([[1.0], [2.0]]), np.array([[4.0]]), 1.0)
    field = Field(np.array([0.5]), np.array([[4.0]]))
    assert profiles.evidence(field, [1], np.array([3.0])) == pytest.approx(-0.5 * (np.log(17.0) + 4.0 / 17.0))


def test_fit_finds_what_goes_together() -> None:
    random = np.random.default_rng(1)
    own = features()
    direction = np.array([1.0, 1.0, 0.0, -1.0, 0.0, 0.0])
    seen = random.normal(0, 0.3, (200, 1)) * direction @ own.T + random.normal(0, 0.02, (200, len(SPANS)))
    seen[::3, 4] = np.nan
    profiles = fit_profiles(seen, own)
    assert profiles.noise == pytest.approx(0.02**2, rel=0.2)
    assert profiles.covariance[0, 1] == pytest.approx(0.09, rel=0.3)
    assert profiles.covariance[0, 3] == pytest.approx(-0.09, rel=0.3)
    assert abs(profiles.covariance[2, 4]) < 0.01


def test_one_device_says_little() -> None:
    profiles = fit_profiles(np.zeros((1, len(SPANS))), features())
    assert np.sqrt(np.diag(profiles.covariance)).mean() > 0.05
