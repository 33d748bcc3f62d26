"""Buffers without what is in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_accept.pipeline.buffer_history import BufferHistory


class Stage:
    """A buffer to which every forward adds its number, and what is shown of it."""

    def __init__(self, shown: bool = True) -> None:
        self.buffer = torch.zeros(1)
        self.shown = torch.zeros(1)
        self.history = BufferHistory({"x": self.buffer}, {"x": self.shown} if shown else None)

    def forward(self, *jobs: int) -> None:
        for job in jobs:
            self.history.begin(job)
            self.buffer += job

    @property
    def values(self) -> tuple[float, float, float]:
        """The newest, the settled and the shown value."""
        return float(self.buffer), float(self.history.settled()["x"]), float(self.shown)


def test_a_job_counts_once_it_has_ended() -> None:
    stage = Stage()
    stage.forward(1, 2)
    assert stage.values == (3, 0, 0)
    stage.history.end(1)
    assert stage.values == (3, 1, 1)
    stage.forward(3)
    stage.history.end(2)
    assert stage.values == (6, 3, 3)
    stage.history.end(3)
    assert stage.values == (6, 6, 6)
    assert stage.history.settled()["x"] is stage.buffer


def test_jobs_that_are_undone_leave_no_trace_wherever_the_next_forward_comes() -> None:
    stage = Stage()
    stage.forward(1, 2, 3)
    stage.history.end(1)
    stage.history.undo(2)
    assert stage.values == (1, 1, 1)
    stage.forward(4)
    assert stage.values == (5, 1, 1)
    for job in (3, 4):
        stage.history.undo(job)
        assert stage.values == (1, 1, 1)
    stage.forward(5)
    stage.history.end(5)
    assert stage.values == (6, 6, 6)


def test_what_others_write_while_nothing_is_in_flight_is_taken_over() -> None:
    stage = Stage()
    stage.shown.fill_(10)
    stage.forward(1)
    assert stage.values == (11, 10, 10)
    stage.history.end(1)
    stage.shown.fill_(20)
    with stage.history.running():
        stage.buffer += 1
    assert stage.values == (21, 21, 21)


def test_a_run_between_belongs_to_the_jobs_after_it() -> None:
    stage = Stage()
    stage.forward(1)
    with stage.history.running():
        stage.buffer += 10
    assert stage.values == (11, 0, 0)
    stage.forward(2)
    stage.history.end(1)
    assert stage.values == (13, 11, 11)


def test_without_an_audience_nothing_is_copied_back() -> None:
    stage = Stage(shown=False)
    stage.forward(1, 2)
    stage.history.end(1)
    assert stage.values == (3, 1, 0)


def test_values_kept_in_inference_mode_can_be_changed_later() -> None:
    stage = Stage()
    with torch.inference_mode():
        stage.history.begin(1)
    stage.history.undo(1)
    stage.forward(2)
    kept: Tensor = stage.history.settled()["x"]
    kept += 1


def test_no_buffers() -> None:
    history = BufferHistory({})
    history.begin(1)
    history.undo(1)
    history.end(1)
    with history.running():
        pass
    assert history.settled() == {}
