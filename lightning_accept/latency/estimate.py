"""From what was measured on a device to the log times of all its sub-models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.profiles import Field, Profiles
from lightning_accept.latency.submodels import Measurement, all_spans
from lightning_accept.partition.times import Floats

WIDER = (0.0, 0.1, 0.2, 0.4, 0.8)
"""Standard deviations that layers' log times may have on top of what devices in training had."""
EVIDENCE = 3.0
"""Log likelihood that a wider deviation must gain before the device counts as unlike those in training."""


@dataclass(frozen=True)
class LinearEstimate:
    """A device's log times as its level, plus the reference, plus what the fields say.

    Attributes:
        level: Mean of h's log times over their reference: the device's speed. Doubling h adds log 2.
        profiles: How such devices vary, forward and backward.
        fields: Deviations from level and reference, forward and backward.
        unusual: Whether the device deviates more than those in training do, so that ``profiles`` had to be widened.
    """

    level: float
    profiles: tuple[Profiles, Profiles]
    fields: tuple[Field, Field]
    unusual: bool

    def spread(self) -> Floats:
        """Standard deviations of the log times of all sub-models, ``[M, 2]``."""
        return np.stack([own.spread(field) for own, field in zip(self.profiles, self.fields, strict=True)], 1)


def linear_estimate(
    reference: Floats, profiles: tuple[Profiles, Profiles], rows: list[int], logs: Floats
) -> LinearEstimate:
    """What h says of a device, without the network.

    Args:
        reference: ``[M, 2]``.
        profiles: Forward and backward.
        rows: Indices of the sub-models of h that are known, at least one.
        logs: Their log times, ``[len(rows), 2]``.
    """
    above = logs - reference[rows]
    level = float(above.mean())
    above = above - level
    allowed = [tuple(own.wider(wider) for own in profiles) for wider in WIDER]
    evidence = [
        sum(own.evidence(own.start(), rows, above[:, column]) for column, own in enumerate(both)) for both in allowed
    ]
    best = int(np.argmax(evidence))
    unusual = evidence[best] > evidence[0] + EVIDENCE
    forward, backward = allowed[best] if unusual else profiles
    fields = (
        forward.condition(forward.start(), rows, above[:, 0]),
        backward.condition(backward.start(), rows, above[:, 1]),
    )
    return LinearEstimate(level, (forward, backward), fields, unusual)


def expected(reference: Floats, linear: LinearEstimate) -> Floats:
    """Log times of all sub-models, ``[M, 2]``."""
    deviations = [own.deviations(field) for own, field in zip(linear.profiles, linear.fields, strict=True)]
    return reference + linear.level + np.stack(deviations, 1)


def network_input(reference: Floats, spans: list[int], rows: list[int], logs: Floats, everywhere: Floats) -> Floats:
    """H as the network takes it: deviations from level and reference, ``[2 * len(spans)]``.

    Args:
        reference: ``[M, 2]``.
        spans: Indices of the sub-models of h.
        rows: Those sub-models that were measured; what ``spans`` has beyond is filled with what is expected.
        logs: Log times of ``rows``.
        everywhere: Expected log times of all sub-models.
    """
    filled = everywhere.copy()
    filled[rows] = logs
    deviations: Floats = (filled[spans] - reference[spans]).reshape(-1)
    return np.asarray(deviations - deviations.mean())


def network_deviations(pretrained: Pretrained, inputs: Floats) -> Floats:
    """What the network adds to the log times of all sub-models, ``[M, 2]``, the mean of its members."""
    count = len(pretrained.reference)
    if pretrained.network is None:
        return np.zeros((count, 2))
    masks = span_masks(len(pretrained.layers))
    profile = torch.as_tensor(inputs / pretrained.network_input, dtype=torch.float32)
    with torch.no_grad():
        outputs: Floats = pretrained.network(masks, profile[None, None]).mean(0)[0].double().numpy()
    return np.asarray(outputs * np.array(pretrained.network_output))


def span_masks(layers: int) -> torch.Tensor:
    """S of all sub-models, ``[M, layers]``: 1 for its layers, else 0."""
    positions = torch.arange(layers)
    bounds = torch.tensor(all_spans(layers))
    return ((positions >= bounds[:, :1]) & (positions < bounds[:, 1:])).float()


def log_times(measured: Sequence[Measurement]) -> Floats:
    """Log seconds of forward and backward, ``[N, 2]``; not a number where impossible.

    A direction that takes next to nothing (the backward of a first layer without parameters) counts as a thousandth
    of both, since ratios of noise would tell nothing.
    """
    seconds = np.array([(one.forward, one.backward) for one in measured], dtype=np.float64).reshape(-1, 2)
    floor = np.maximum(1e-3 * seconds.sum(1, keepdims=True), 1e-9)
    possible = np.isfinite(floor)
    logs: Floats = np.log(np.where(possible, np.maximum(seconds, floor), np.nan))
    return logs
