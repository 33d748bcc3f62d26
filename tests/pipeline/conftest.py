"""A progress line that takes down what it would show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_accept.progress import Activity, ProgressLine


class NotedActivity(Activity):
    def __init__(self, title: str, total: float, unit: str = "") -> None:
        self.states = [(title, 0.0)]
        super().__init__(title, total, unit)
        self._noting = threading.Lock()

    def begin(self, title: str) -> None:
        with self._noting:
            super().begin(title)
            self.states.append(self.state)

    def update(self, share: float) -> None:
        with self._noting:
            super().update(share)
            self.states.append(self.state)

    def advance(self, amount: float = 1.0, title: str | None = None) -> None:
        with self._noting:
            super().advance(amount, title)
            self.states.append(self.state)


class NotedLine(ProgressLine):
    def __init__(self) -> None:
        super().__init__()
        self.activities: list[NotedActivity] = []

    @contextmanager
    def show(self, title: str, total: float, unit: str = "") -> Iterator[Activity]:
        self.activities.append(NotedActivity(title, total, unit))
        yield self.activities[-1]

    def take(self) -> list[list[tuple[str, float]]]:
        """Per activity what was done and how far it was, as a share of all; what was noted is dropped."""
        activities, self.activities = self.activities, []
        return [[(title, round(done / one.total, 3)) for title, done in one.states] for one in activities]


@pytest.fixture
def noted() -> NotedLine:
    return NotedLine()
