"""The learned latency predictor: ten measured sub-models of a device tell the times of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_accept.latency.adaptation import Adaptation
from lightning_accept.latency.base import LatencyModel, check_measured, check_model, check_span
from lightning_accept.latency.estimate import expected, linear_estimate, log_times, network_deviations, network_input
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.submodels import Measurement, Span, all_spans
from lightning_accept.partition.times import SubModelTimes, TableTimes


class Predictor(LatencyModel):
    """Predicts from h, the times of the representative sub-models, with what pre-training on other devices left.

    The logarithm of a sub-model's time is the device's level, plus the reference of the devices in training, plus the
    deviations that the network and a linear estimate take from h. Doubling h doubles every prediction. A device that
    deviates more than any in training is predicted without the network, from its own h and the reference alone;
    :meth:`uncertainty` then says how little that is. Observations correct each device for itself, so that nothing
    learnt of others is lost.
    """

    name = "predictor"

    def __init__(self, pretrained: Pretrained) -> None:
        self.pretrained = pretrained
        spans = all_spans(len(pretrained.layers))
        self._rows = {span: row for row, span in enumerate(spans)}
        self._devices: dict[str, _Device] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Predictor:
        """Read a file that :meth:`Pretrained.save` wrote.

        Raises:
            ValueError: If the file is something else, or damaged.
            OSError: If it cannot be read.
        """
        return cls(Pretrained.load(path))

    def prepare(self, layers: int, flops: Sequence[float], names: Sequence[str] = ()) -> None:
        """Start with a model, forgetting all devices.

        Raises:
            ValueError: If the predictor was trained for another model.
        """
        check_model(layers, flops, names)
        self.pretrained.check(flops, names)
        self._devices.clear()

    def spans(self, device: str, central: bool) -> list[Span]:
        """The sub-models of h, the same on every device."""
        return list(self.pretrained.spans)

    def learn(self, device: str, measured: Sequence[Measurement]) -> None:
        """Take in h. More than the sub-models of h may be given, and are used.

        Raises:
            ValueError: If one of h is missing, a time is negative, or the device can run none of them.
        """
        pretrained = self.pretrained
        found = check_measured(device, len(pretrained.layers), pretrained.spans, measured)
        possible = [one for one in found.values() if one.possible]
        if not possible:
            raise ValueError(f"{device}: it cannot run any of the sub-models measured; use a smaller batch")
        logs, rows = log_times(possible), [self._rows[one.span] for one in possible]
        linear = linear_estimate(pretrained.reference, pretrained.profiles, rows, logs)
        logs_of_all = expected(pretrained.reference, linear)
        if not linear.unusual:
            spans = [self._rows[span] for span in pretrained.spans]
            given = network_input(pretrained.reference, spans, rows, logs, logs_of_all)
            logs_of_all = logs_of_all + network_deviations(pretrained, given)
        impossible = tuple(one.span for one in found.values() if not one.possible)
        self._devices[device] = _Device(
            Adaptation(linear, logs_of_all, pretrained.calibration), impossible, linear.unusual
        )

    def check(self, device: str, measured: Measurement) -> None:
        """Take in a further sub-model that was measured on a device."""
        known = self._known(device)
        if not measured.possible:
            check_span(device, len(self.pretrained.layers), measured.span)
            known.impossible = (*known.impossible, measured.span)
            return
        # Two reports that say the same: a surprising one is not believed alone.
        for _ in range(2):
            self.observe(device, measured)

    def observe(self, device: str, sample: Measurement) -> None:
        """Correct the device's times by a stage's time."""
        known = self._known(device)
        check_span(device, len(self.pretrained.layers), sample.span)
        if sample.possible and sample.seconds > 0:
            known.adaptation.observe(self._rows[sample.span], log_times([sample])[0])

    def times(self, device: str) -> SubModelTimes:
        """Times of all sub-models on a device."""
        known = self._known(device)
        layers = len(self.pretrained.layers)
        tables = np.full((2, layers + 1, layers + 1), np.inf)
        first, stop = np.array(list(self._rows)).T
        tables[:, first, stop] = np.exp(known.adaptation.logs().T)
        for start, end in known.impossible:
            tables[:, : start + 1, end:] = np.inf
        return TableTimes(*tables)

    def uncertainty(self, device: str) -> float:
        """Expected relative error of :meth:`times`, the mean over all sub-models."""
        return self._known(device).adaptation.error()

    def unusual(self, device: str) -> bool:
        """Whether the device deviates more than those in training, so that the network is not used for it."""
        return self._known(device).unusual

    def _known(self, device: str) -> _Device:
        if device not in self._devices:
            raise ValueError(f"{device}: nothing was measured on it yet; measure what spans() names, then learn()")
        return self._devices[device]


@dataclass
class _Device:
    adaptation: Adaptation
    impossible: tuple[Span, ...]
    unusual: bool
