"""Sub-models: contiguous runs of layers, and what was measured of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
"""First layer of a sub-model and the layer after its last."""


@dataclass(frozen=True)
class Measurement:
    """What one sub-model took on one device, for one batch.

    Attributes:
        first: Its first layer.
        stop: The layer after its last.
        forward: Seconds of the forward; infinity where the device cannot run it.
        backward: Seconds of the backward; infinity likewise.
    """

    first: int
    stop: int
    forward: float
    backward: float

    @property
    def span(self) -> Span:
        """The sub-model."""
        return self.first, self.stop

    @property
    def seconds(self) -> float:
        """Forward plus backward."""
        return self.forward + self.backward

    @property
    def possible(self) -> bool:
        """Whether the device can run it."""
        return math.isfinite(self.seconds)


def all_spans(layers: int) -> list[Span]:
    """All sub-models of a model with so many layers, L (L + 1) / 2 of them, by first layer and length."""
    return [(first, stop) for first in range(layers) for stop in range(first + 1, layers + 1)]


def span_flops(flops: Sequence[float], span: Span) -> float:
    """FLOPs of a sub-model from those of the layers."""
    return float(sum(flops[span[0] : span[1]]))


def representatives(flops: Sequence[float], count: int = 10) -> list[Span]:
    """The sub-models whose times describe a device (h of AccEPT, arXiv 2311.05827).

    All M sub-models are sorted by FLOPs; taken are those at ``round(k (M - 1) / (count - 1))``, each once.

    Args:
        flops: Forward FLOPs of every layer.
        count: How many; fewer if there are fewer sub-models.

    Raises:
        ValueError: If there are no layers or ``count`` is below 2.
    """
    if not flops or count < 2:
        raise ValueError("representatives need at least one layer and a count of at least 2")
    spans = sorted(all_spans(len(flops)), key=lambda span: (span_flops(flops, span), span))
    indices = [round(k * (len(spans) - 1) / (count - 1)) for k in range(count)]
    return [spans[index] for index in dict.fromkeys(indices)]
