"""The central node's own time per batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.batch_clock import BatchClock
from lightning_accept.pipeline.messages import StageReport


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def parts() -> tuple[Any, Clock, BatchClock]:
    pipeline = SimpleNamespace(
        waited=0.0,
        completed=0,
        term=1,
        reports={0: StageReport(0.1, 0.2, 0.05)},
        schedule=Schedule(2, (2,), 1, 2),
    )
    clock = Clock()
    return pipeline, clock, BatchClock(pipeline, clock)


def test_rest_is_what_neither_waits_nor_computes_stage_0(parts: tuple[Any, Clock, BatchClock]) -> None:
    pipeline, clock, batches = parts
    assert batches.lap() is None
    clock.now, pipeline.waited, pipeline.completed = 2.0, 0.5, 1
    assert batches.lap() == pytest.approx(2.0 - 0.5 - 2 * 0.3 - 0.05)


def test_never_negative(parts: tuple[Any, Clock, BatchClock]) -> None:
    pipeline, clock, batches = parts
    batches.lap()
    clock.now, pipeline.completed = 0.1, 1
    assert batches.lap() == 0.0


@pytest.mark.parametrize("changes", [{"completed": 0}, {"completed": 2}, {"completed": 1, "term": 2}, {"reports": {}}])
def test_nothing_to_tell(parts: tuple[Any, Clock, BatchClock], changes: dict[str, Any]) -> None:
    pipeline, clock, batches = parts
    batches.lap()
    clock.now = 2.0
    vars(pipeline).update(changes)
    assert batches.lap() is None
