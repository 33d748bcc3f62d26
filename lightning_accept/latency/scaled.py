"""What latency models share that scale each device's measured times by what training reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lightning_accept.latency.base import LatencyModel, check_measured, check_model, check_span
from lightning_accept.latency.corrections import corrections
from lightning_accept.latency.scale import RunningScale
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.partition.times import AdditiveTimes, Floats, ScaledTimes, SubModelTimes, TableTimes


class ScaledModel(LatencyModel):
    """Times come from measurements, and every observation of a device scales all of that device's times.

    A sub-model that was checked takes what it took then, and others are corrected as far as they are like it (see
    :func:`corrections`). Sub-models that were measured as impossible stay so, and with them every longer one that holds
    them.
    """

    expected_error: ClassVar[float]
    """Relative error to expect before anything was observed."""

    def __init__(self) -> None:
        self._layers = 0
        self._flops: tuple[float, ...] = ()
        self._measured: dict[str, dict[Span, Measurement]] = {}
        self._checked: dict[str, dict[Span, Measurement]] = {}
        self._scales: dict[str, RunningScale] = {}
        self._central: str | None = None

    def prepare(self, layers: int, flops: Sequence[float], names: Sequence[str] = ()) -> None:
        """Start with a model, forgetting all devices."""
        check_model(layers, flops, names)
        self._layers = layers
        self._flops = tuple(float(one) for one in flops)
        self._measured.clear()
        self._checked.clear()
        self._scales.clear()
        self._central = None

    def spans(self, device: str, central: bool) -> list[Span]:
        """The sub-models to measure on a device."""
        if central:
            self._central = device
        elif device == self._central:
            self._central = None
        return self._wanted(device)

    def learn(self, device: str, measured: Sequence[Measurement]) -> None:
        """Take in what was measured on a device."""
        self._measured[device] = check_measured(device, self._layers, self._wanted(device), measured)
        self._checked[device] = {}
        self._scales[device] = RunningScale(self.expected_error)

    def check(self, device: str, measured: Measurement) -> None:
        """Take in a further sub-model that was measured on a device."""
        self._known(device)
        check_span(device, self._layers, measured.span)
        self._checked[device][measured.span] = measured

    def observe(self, device: str, sample: Measurement) -> None:
        """Scale the device's times towards what was observed."""
        check_span(device, self._layers, sample.span)
        times = self._unscaled(device)
        predicted = times.forward(*sample.span) + times.backward(*sample.span)
        if sample.possible and sample.seconds > 0 and 0 < predicted < np.inf:
            self._scales[device].observe(predicted, sample.seconds)

    def times(self, device: str) -> SubModelTimes:
        """Times of all sub-models on a device."""
        return self._corrected(device, self._known(device).factor)

    def uncertainty(self, device: str) -> float:
        """Expected relative error of :meth:`times`."""
        return self._known(device).error

    @abstractmethod
    def _wanted(self, device: str) -> list[Span]:
        """The sub-models to measure on a device."""

    @abstractmethod
    def _times(self, device: str, factor: float) -> SubModelTimes:
        """The device's times, all of them multiplied by ``factor``."""

    def _unscaled(self, device: str) -> SubModelTimes:
        self._known(device)
        return self._corrected(device, 1.0)

    def _corrected(self, device: str, factor: float) -> SubModelTimes:
        """The device's times by what was measured and checked, all of them multiplied by ``factor``."""
        times, ratios = self._times(device, factor), {}
        for span, one in self._checked[device].items():
            expected = times.forward(*span) + times.backward(*span)
            if one.possible and one.seconds > 0 and 0 < expected < np.inf:
                ratios[span] = factor * one.seconds / expected
        return ScaledTimes(times, corrections(self._flops, ratios)) if ratios else times

    def _known(self, device: str) -> RunningScale:
        if device not in self._scales:
            raise ValueError(f"{device}: nothing was measured on it yet; measure what spans() names, then learn()")
        return self._scales[device]

    def _impossible(self, device: str) -> list[Span]:
        found = [*self._measured[device].values(), *self._checked[device].values()]
        return [one.span for one in found if not one.possible]


def singles(layers: int) -> list[Span]:
    """Every layer alone."""
    return [(layer, layer + 1) for layer in range(layers)]


def layer_times(measured: dict[Span, Measurement], layers: int) -> tuple[Floats, Floats]:
    """Forward and backward seconds of the layers measured alone, ``[layers]`` each; infinity where impossible."""
    alone = [measured[span] for span in singles(layers)]
    return np.array([one.forward for one in alone]), np.array([one.backward for one in alone])


def summed(forward: Floats, backward: Floats, impossible: Sequence[Span], joined: float = 1.0) -> SubModelTimes:
    """Times of all sub-models as sums of the layers' times.

    Args:
        forward: Seconds of each layer, ``[layers]``.
        backward: The same for the backwards.
        impossible: Sub-models that cannot be run, nor any that hold one of them.
        joined: The whole model's time over the sum of its layers' times. A sub-model of n layers is taken to have
            (n - 1) / (layers - 1) of that gain or loss.
    """
    layers = len(forward)
    if not impossible and joined == 1.0:
        return AdditiveTimes(list(forward), list(backward))
    possible = np.isfinite(forward) & np.isfinite(backward)
    length = np.maximum(np.arange(layers + 1)[None, :] - np.arange(layers + 1)[:, None] - 1, 0)
    factor = 1.0 + (joined - 1.0) * length / max(layers - 1, 1)
    tables = []
    for seconds in (forward, backward):
        total = np.concatenate([np.zeros(1), np.cumsum(np.where(possible, seconds, 0.0))])
        table = np.maximum(total[None, :] - total[:, None], 0.0) * factor
        for first, stop in impossible:
            table[: first + 1, stop:] = np.inf
        tables.append(table)
    return TableTimes(*tables)
