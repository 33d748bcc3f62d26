"""The adaptive update: what training reports of a device corrects that device's predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_accept.latency.estimate import LinearEstimate
from lightning_accept.latency.profiles import REACH, Profiles
from lightning_accept.latency.submodels import all_spans
from lightning_accept.partition.times import Floats

OFFSET = 0.03
"""Standard deviation of the log factor by which a stage in training is slower than its measurement."""
CHANGED = 1.0
"""The same once the device has evidently changed its speed since it was measured."""
REPORT = 0.03
"""Standard deviation of the log of one reported time."""
DRIFT = 0.005
"""Standard deviation by which a reported time ages with every later report."""
REMEMBER = 4.0
"""Reports of the same sub-model that are averaged; older ones fade."""
JUMP = 0.3
"""Log ratio from which a report is not believed until the next one says the same."""


@dataclass
class _Report:
    logs: Floats
    weight: float
    at: int


class Adaptation:
    """Corrects a device's log times by Gaussian-process regression on the times that were reported.

    Two sub-models' errors go together as far as profiles of devices vary together (learnt in pre-training, which
    stands in for a replay of those devices' samples), as the sub-models have layers in common, and as training has an
    overhead that measuring does not see.

    Args:
        linear: What h said of this device.
        logs: Log times predicted from h, ``[M, 2]``.
        calibration: Errors to be expected over those that ``linear`` expects.
    """

    def __init__(self, linear: LinearEstimate, logs: Floats, calibration: float) -> None:
        self._predicted = logs
        self._kernels = [
            _Kernel(own, field.covariance, calibration)
            for own, field in zip(linear.profiles, linear.fields, strict=True)
        ]
        self._reports: dict[int, _Report] = {}
        self._count = 0
        self._offset = OFFSET
        self._doubted = 0.0
        self._missed = 0.0
        self._current: tuple[Floats, Floats] | None = None

    def observe(self, row: int, logs: Floats) -> None:
        """Take in a report: the sub-model's index, and its log times ``[2]``."""
        expected, spread = self._posterior()
        missed = float(np.logaddexp(*logs) - np.logaddexp(*expected[row]))
        if abs(missed) > max(JUMP, 4.0 * float(spread[row].mean())):
            if self._doubted * missed <= 0:
                self._doubted = missed
                return
            self._reports.clear()
            self._offset = CHANGED
        self._doubted = 0.0
        self._missed += (abs(math.expm1(-missed)) - self._missed) / REMEMBER
        self._count += 1
        known = self._reports.get(row)
        if known is None:
            self._reports[row] = _Report(logs, 1.0, self._count)
        else:
            known.weight = min(known.weight + 1.0, REMEMBER)
            known.logs = known.logs + (logs - known.logs) / known.weight
            known.at = self._count
        self._current = None

    def logs(self) -> Floats:
        """Log times of all sub-models, ``[M, 2]``."""
        return self._posterior()[0]

    def error(self) -> float:
        """Expected relative error, the mean over all sub-models; at least what the last reports were missed by."""
        expected, spread = self._posterior()
        seconds = np.exp(expected)
        deviation = (spread * seconds).sum(1) / seconds.sum(1)
        # The mean of a normal distribution's absolute value.
        return max(float(deviation.mean()) * math.sqrt(2 / math.pi), self._missed)

    def _posterior(self) -> tuple[Floats, Floats]:
        """Log times and their standard deviations, ``[M, 2]`` each."""
        if self._current is None:
            rows = list(self._reports)
            errors = np.array(
                [REPORT**2 / one.weight + DRIFT**2 * (self._count - one.at) for one in self._reports.values()]
            )
            logs, spread = self._predicted.copy(), np.empty_like(self._predicted)
            for column, kernel in enumerate(self._kernels):
                above = np.array([one.logs[column] for one in self._reports.values()]) - logs[rows, column]
                change, variance = kernel.condition(rows, above, errors, self._offset)
                logs[:, column] += change
                spread[:, column] = np.sqrt(variance)
            self._current = logs, spread
        return self._current


class _Kernel:
    """Covariances of the errors of one direction's log times.

    Args:
        profiles: How devices vary.
        covariance: Of the coefficients, once h is known.
        calibration: What standard deviations are multiplied by.
    """

    def __init__(self, profiles: Profiles, covariance: Floats, calibration: float) -> None:
        self._features = profiles.features
        self._crossed = calibration**2 * profiles.features @ covariance
        self._noise, self._alike = calibration**2 * profiles.noise, profiles.alike
        self._spans = np.array(all_spans(profiles.features.shape[1] - 1), dtype=np.float64)

    def condition(self, rows: list[int], above: Floats, errors: Floats, offset: float) -> tuple[Floats, Floats]:
        """Expected errors of all sub-models and their variances, ``[M]`` each, once those of ``rows`` are known.

        Args:
            rows: The sub-models' indices.
            above: Their log times less predictions.
            errors: Variances of these.
            offset: Standard deviation of what all errors have in common.
        """
        variance = np.einsum("mf,mf->m", self._crossed, self._features) + self._noise
        if not rows:
            return np.zeros(len(variance)), variance
        apart = np.abs(self._spans[:, None] - self._spans[None, rows]).sum(-1)
        cross = self._crossed @ self._features[rows].T + offset**2
        cross += self._alike * self._noise * np.exp(-apart / REACH)
        within = cross[rows] + np.diag(errors + (1 - self._alike) * self._noise)
        solved = np.linalg.solve(within, cross.T)
        left = variance + offset**2 - np.einsum("mr,rm->m", cross, solved)
        return above @ solved, np.maximum(left, 0.0)
