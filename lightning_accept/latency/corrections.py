"""From sub-models whose times were off to factors for all sub-models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_accept.latency.submodels import Span
from lightning_accept.partition.times import Floats

_ALIKE = 1e-9
"""What two sub-models of the same layers are taken to differ by, as a part of them."""


def corrections(work: Sequence[float], ratios: Mapping[Span, float]) -> Floats:
    """Factors for all sub-models, from those that some turned out to need.

    The logarithm of a factor is a mean of those that are known and of 0 (no correction). A known one has the weight
    s / (1 - s), where s is how alike the two sub-models are: the work that they have in common over the work of both
    together; 0 has the weight 1. Known factors are met so, and for a sub-model that shares half the work, such a
    factor and no correction count the same (Shepard's inverse distance weighting, 1968).

    Args:
        work: A measure of each layer's work that tells how alike two sub-models are, such as FLOPs, ``[layers]``.
        ratios: Measured over predicted seconds of some sub-models.

    Returns:
        ``[layers + 1, layers + 1]``, at ``[first, stop]``; 1 on the diagonal and below.
    """
    each = np.asarray(work, dtype=np.float64)
    # So that layers without work of their own are layers, too.
    total = np.concatenate([np.zeros(1), np.cumsum(each + max(float(each.mean()), 1.0) * 1e-3)])
    begins, ends = total[:, None], total[None, :]
    sums, weights = np.zeros((len(total), len(total))), np.ones((len(total), len(total)))
    for (first, stop), ratio in ratios.items():
        common = np.maximum(np.minimum(ends, total[stop]) - np.maximum(begins, total[first]), 0.0)
        both = np.maximum(ends - begins, 0.0) + total[stop] - total[first] - common
        alike = np.minimum(common / both, 1.0 - _ALIKE)
        weight = alike / (1.0 - alike)
        sums += weight * np.log(ratio)
        weights += weight
    factors: Floats = np.exp(np.triu(sums / weights, 1))
    return factors
