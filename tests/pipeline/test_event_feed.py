"""EventFeed: every event once, on one clock, and none lost when stages are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_accept.pipeline.event_feed import EventFeed
from lightning_accept.pipeline.events import Event, EventLog, EventReply
from lightning_accept.pipeline.messages import TransportError


class Worker:
    """A worker whose clock is ahead by some seconds, and which answers after as many as ``way`` in each direction."""

    def __init__(self, name: str, ahead: float, way: float = 0.25) -> None:
        self.name, self.ahead, self.way = name, ahead, way
        self.now = 1e9
        self.term = 1
        self.log = EventLog()
        self.error: Exception | None = None

    def did(self, here: float) -> None:
        start = here + self.ahead
        self.log.record(Event("forward", start, start + 1.0, 0, 0, stage=1, term=self.term))

    def events(self, term: int, after: int) -> EventReply:
        if self.error is not None:
            raise self.error
        sent, self.now = self.now, self.now + 2 * self.way
        found, last = self.log.since(after if term == self.term else 0)
        return EventReply(found, last, self.term, sent + self.way + self.ahead, sent, self.now)


def make(*workers: Worker) -> tuple[Any, EventFeed]:
    pipeline: Any = SimpleNamespace(events=EventLog(), claimed=list(workers), before_term=[])
    return pipeline, EventFeed(pipeline)


def test_on_one_clock_and_once() -> None:
    ahead, behind = Worker("a", 5000.0), Worker("b", -300.0)
    pipeline, feed = make(ahead, behind)
    behind.did(1e9 + 2.0)
    ahead.did(1e9 + 1.0)
    pipeline.events.record(Event("forward", 1e9 + 3.0, 1e9 + 4.0))
    assert [event.start - 1e9 for event in feed.poll()] == pytest.approx([1.0, 2.0, 3.0])
    assert feed.poll() == []
    assert feed.clock_errors() == pytest.approx({"a": 0.25, "b": 0.25}, rel=1e-3)


def test_what_was_before_the_feed_is_left_out() -> None:
    worker = Worker("a", 0.0)
    worker.did(0.0)
    pipeline: Any = SimpleNamespace(events=EventLog(), claimed=[worker], before_term=[])
    pipeline.events.record(Event("forward", 0.0, 1.0))
    feed = EventFeed(pipeline)
    assert feed.poll() == []


def test_nothing_is_lost_when_stages_are_replaced() -> None:
    worker = Worker("a", 0.0)
    pipeline, feed = make(worker)
    worker.did(1e9 + 1.0)
    for action in pipeline.before_term:
        action()
    worker.term, worker.log = 2, EventLog()
    worker.did(1e9 + 2.0)
    assert [(event.term, event.start - 1e9) for event in feed.poll()] == [(1, 1.0), (2, 2.0)]


def test_a_worker_that_does_not_answer() -> None:
    worker = Worker("a", 0.0)
    pipeline, feed = make(worker)
    pipeline.events.record(Event("forward", 1e9 + 1.0, 1e9 + 2.0))
    worker.error = TransportError("gone")
    with pytest.raises(TransportError, match="gone"):
        feed.poll()
    worker.error = None
    assert len(feed.poll()) == 1
