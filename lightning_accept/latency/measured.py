"""Measuring every layer on every device."""

from __future__ import annotations

from lightning_accept.latency.scaled import ScaledModel, layer_times, singles, summed
from lightning_accept.latency.submodels import Span
from lightning_accept.partition.times import SubModelTimes


class Measured(ScaledModel):
    """Every layer is measured alone on every device; a sub-model takes the sum of its layers' times.

    Layers that run together may be faster or slower than one by one: the whole model is measured too, where it fits,
    and sub-models get their part of the difference.
    """

    name = "measured"
    expected_error = 0.1

    def _wanted(self, device: str) -> list[Span]:
        return list(dict.fromkeys([*singles(self._layers), (0, self._layers)]))

    def _times(self, device: str, factor: float) -> SubModelTimes:
        measured = self._measured[device]
        forward, backward = layer_times(measured, self._layers)
        whole = measured[0, self._layers].seconds
        alone = float(forward.sum() + backward.sum())
        joined = whole / alone if 0 < alone < float("inf") and 0 < whole < float("inf") else 1.0
        return summed(factor * forward, factor * backward, self._impossible(device), joined)
