"""StageWatch: compares the times that stages report with what is expected of them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_accept.pipeline.messages import StageReport

_KEPT = 64
_BLEND = 0.5
"""Weight of a window's median in what is expected of the next one."""


@dataclass(frozen=True)
class Change:
    """A stage whose time differs from what is expected of it.

    Attributes:
        stage: Number of the stage.
        expected: Seconds per job that were expected.
        measured: Median of the seconds per job that it reported.
    """

    stage: int
    expected: float
    measured: float

    @property
    def ratio(self) -> float:
        """How many times as long as expected it takes."""
        return self.measured / self.expected


@dataclass(frozen=True)
class StageMedian:
    """Medians of what one stage reported since the last look, in seconds per job."""

    forward: float
    backward: float
    step: float

    @property
    def seconds(self) -> float:
        """Forward plus backward."""
        return self.forward + self.backward


class StageWatch:
    """Keeps the stages' reports between two looks at them.

    A single report says little, for devices are noisy; a window's median is compared with those of earlier windows in
    the same deployment. What is expected at first is what that deployment's first window shows: measuring before
    training misses what training adds, and that is no change of the device.
    """

    def __init__(self) -> None:
        self._reports: dict[int, deque[StageReport]] = {}
        self._expected: dict[int, float] = {}

    def restart(self, stage: int | None = None) -> None:
        """Forget one stage, or all: another deployment, or another device speed, begins."""
        if stage is None:
            self._reports.clear()
            self._expected.clear()
        else:
            self._reports.pop(stage, None)
            self._expected.pop(stage, None)

    def note(self, reports: Mapping[int, StageReport]) -> None:
        """Take in what the stages reported with one batch."""
        for stage, report in reports.items():
            self._reports.setdefault(stage, deque(maxlen=_KEPT)).append(report)

    def look(self, threshold: float) -> tuple[dict[int, StageMedian], list[Change]]:
        """The medians since the last look, and the stages that are off by more than ``threshold``.

        Args:
            threshold: Relative; a stage is off when it takes ``1 + threshold`` times as long as expected or more, or
                at most 1 / (1 + threshold) times as long.
        """
        medians, changes = {}, []
        for stage, kept in self._reports.items():
            if not kept:
                continue
            median = StageMedian(*(statistics.median(getattr(r, name) for r in kept) for name in _FIELDS))
            medians[stage] = median
            kept.clear()
            expected = self._expected.get(stage)
            if expected is None or median.seconds <= 0:
                self._expected[stage] = median.seconds
            elif not 1 / (1 + threshold) <= median.seconds / expected <= 1 + threshold:
                changes.append(Change(stage, expected, median.seconds))
            else:
                self._expected[stage] = expected + _BLEND * (median.seconds - expected)
        return medians, changes


_FIELDS = ("forward", "backward", "step")
