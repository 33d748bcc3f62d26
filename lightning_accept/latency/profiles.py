"""How devices' profiles vary: a reference, what each layer may deviate from it, and which deviations go together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lightning_accept.latency.submodels import all_spans
from lightning_accept.partition.times import Floats

ROUNDS = 15
"""Rounds of expectation maximisation; the covariance hardly changes after ten."""
REACH = 2.0
"""Difference in first layer and stop, added up, over which what sub-models have in common falls to 1/e."""
USUAL_DEVIATION = 0.2
"""Standard deviation of a layer's log time that is assumed until enough devices have been seen."""


@dataclass(frozen=True)
class Field:
    """Log times of all M sub-models as far as they are known: a normal distribution over F coefficients.

    Attributes:
        mean: ``[F]``, coefficients of the profile's features.
        covariance: ``[F, F]``.
    """

    mean: Floats
    covariance: Floats


@dataclass(frozen=True)
class Profiles:
    """Deviations of log times from the reference for one direction, forward or backward: ``features @ u + noise``.

    u, normally distributed over devices, has a log factor for every layer, which counts in a sub-model by the layer's
    share of its time, and one coefficient for what running layers together gains or costs.

    Attributes:
        features: ``[M, layers + 1]`` for the sub-models in the order of :func:`all_spans`.
        covariance: Of u, ``[layers + 1, layers + 1]``.
        noise: Variance of what the features cannot express, measurement noise included.
        alike: Share of the noise that similar sub-models of a device have in common, from 0 to 1. It fades with the
            distance of their first layers and stops, see :data:`REACH`.
    """

    features: Floats
    covariance: Floats
    noise: float
    alike: float = 0.0

    def start(self) -> Field:
        """Nothing known of a device yet."""
        return Field(np.zeros(len(self.covariance)), self.covariance)

    def wider(self, deviation: float) -> Profiles:
        """For a device unlike those seen: each coefficient may deviate by so much more, and half as much in sum."""
        covariance = self.covariance + deviation**2 * np.eye(len(self.covariance))
        return replace(self, covariance=covariance, noise=self.noise + (deviation / 2) ** 2)

    def condition(self, field: Field, rows: list[int], deviations: Floats) -> Field:
        """The field once deviations from the reference of some sub-models are known.

        Args:
            field: What is known before.
            rows: The sub-models' indices.
            deviations: Log time less reference of each, ``[len(rows)]``.
        """
        features = self.features[rows]
        cross = field.covariance @ features.T
        spread = features @ cross + self.noise * np.eye(len(rows))
        gain = np.linalg.solve(spread, cross.T).T
        return Field(field.mean + gain @ (deviations - features @ field.mean), field.covariance - gain @ cross.T)

    def evidence(self, field: Field, rows: list[int], deviations: Floats) -> float:
        """Log likelihood of deviations, up to a constant."""
        features = self.features[rows]
        spread = features @ field.covariance @ features.T + self.noise * np.eye(len(rows))
        missed = deviations - features @ field.mean
        return float(-0.5 * (np.linalg.slogdet(spread)[1] + missed @ np.linalg.solve(spread, missed)))

    def deviations(self, field: Field) -> Floats:
        """Expected log time less reference of all sub-models, ``[M]``."""
        expected: Floats = self.features @ field.mean
        return expected

    def spread(self, field: Field) -> Floats:
        """Standard deviation of the log times of all sub-models, ``[M]``."""
        own = np.einsum("mi,ij,mj->m", self.features, field.covariance, self.features)
        deviation: Floats = np.sqrt(np.maximum(own, 0.0) + self.noise)
        return deviation


def profile_features(reference: Floats, layers: int) -> Floats:
    """The features of all sub-models, ``[M, layers + 1]``.

    Args:
        reference: Log times of all sub-models, ``[M]``, of which those of the layers alone are used.
        layers: Number of layers.
    """
    spans = all_spans(layers)
    alone = np.exp([reference[index] for index, (first, stop) in enumerate(spans) if stop == first + 1])
    features = np.zeros((len(spans), layers + 1))
    for index, (first, stop) in enumerate(spans):
        features[index, first:stop] = alone[first:stop] / alone[first:stop].sum()
        features[index, layers] = (stop - first - 1) / max(layers - 1, 1)
    return features


def fit_profiles(deviations: Floats, features: Floats) -> Profiles:
    """Covariance and noise by expectation maximisation of a linear model with random effects (Laird, Ware 1982).

    The covariance is drawn towards independent deviations with the strength of a quarter of the number of
    coefficients, so that it is of use from the first device on.

    Args:
        deviations: Log time less reference, ``[devices, M]``; not a number where not measured.
        features: ``[M, F]``.
    """
    devices, size = len(deviations), features.shape[1]
    known = np.isfinite(deviations)
    values = np.where(known, deviations, 0.0)
    covariance, noise = USUAL_DEVIATION**2 * np.eye(size), 0.03**2
    weight = size / 4
    left = np.zeros_like(values)
    for _ in range(ROUNDS):
        inverse = np.linalg.inv(covariance)
        second, missed = np.zeros((size, size)), 0.0
        for row, present, rest in zip(values, known, left, strict=True):
            own = features if present.all() else features[present]
            spread = np.linalg.inv(own.T @ own / noise + inverse)
            mean = spread @ (features.T @ row) / noise
            rest[present] = row[present] - own @ mean
            second += np.outer(mean, mean) + spread
            missed += float(np.square(rest).sum() + np.einsum("mi,ij,mj->", own, spread, own))
        usual = (np.trace(second) / size + USUAL_DEVIATION**2) / (devices + 1)
        covariance = (second + weight * usual * np.eye(size)) / (devices + weight)
        noise = max(missed / max(int(known.sum()), 1), 1e-6)
    return Profiles(features, covariance, noise, _alike(left, size - 1))


def _alike(left: Floats, layers: int) -> float:
    """:attr:`Profiles.alike` from how sub-models that differ by one layer at their end were missed alike."""
    row = {span: index for index, span in enumerate(all_spans(layers))}
    near = [(index, row[first, stop + 1]) for (first, stop), index in row.items() if stop < layers]
    if not near or not left.any():
        return 0.0
    shorter, longer = left[:, [one for one, _ in near]], left[:, [other for _, other in near]]
    size = np.sqrt(np.square(shorter).sum() * np.square(longer).sum())
    return float(np.clip((shorter * longer).sum() / max(float(size), 1e-12) * np.exp(1 / REACH), 0.0, 0.9))
