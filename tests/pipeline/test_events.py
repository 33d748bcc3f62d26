"""Events: kept up to a number, and the same after the way over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_accept.pipeline.events import Event, EventLog, events_from_json, events_to_json, no_events


def event(number: int) -> Event:
    return Event("forward", number + 0.25, number + 0.5, number, number, stage=2, term=3)


def test_each_event_is_handed_out_once() -> None:
    log = EventLog()
    log.record(event(0))
    log.record(event(1))
    assert log.since(0) == ([event(0), event(1)], 2)
    assert log.since(2) == ([], 2)
    log.record(event(2))
    assert log.since(2) == ([event(2)], 3)


def test_the_oldest_are_dropped() -> None:
    log = EventLog(kept=3)
    for number in range(10):
        log.record(event(number))
    assert log.since(2) == ([event(7), event(8), event(9)], 10)
    assert log.since(9) == ([event(9)], 10)


def test_a_number_that_was_never_given_hands_out_nothing() -> None:
    log = EventLog()
    log.record(event(0))
    assert log.since(7) == ([], 1)


def test_over_the_wire() -> None:
    events = [event(1), Event("send", 2.0, 2.5, 4, 5, 1, "backward", 1, 1000, 2, 3), Event("step", 3.0, 3.1, -1, 5)]
    answer = json.loads(json.dumps(events_to_json(events, 7, 9.5, 2, 3)))
    reply = events_from_json(answer, 1.0, 2.0)
    assert (reply.last, reply.term, reply.now, reply.sent, reply.received) == (7, 3, 9.5, 1.0, 2.0)
    assert reply.events[:2] == events[:2]
    assert reply.events[2].end == pytest.approx(3.1) and reply.events[2].term == 3


def test_a_worker_without_a_stage_tells_its_clock() -> None:
    reply = events_from_json(no_events(), 0.0, 0.0)
    assert reply.events == [] and reply.term == 0 and reply.now > 0


GOOD = ["forward", 1.0, 0.5, 0, 0, 0, "", -1, 0]


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, "dance"), (1, "soon"), (1, float("inf")), (2, -1.0), (3, 1.5), (4, True), (6, "gossip"), (7, None)],
)
def test_what_is_no_event_is_refused(position: int, value: Any) -> None:
    row = [*GOOD[:position], value, *GOOD[position + 1 :]]
    with pytest.raises(ValueError, match="is no event"):
        events_from_json({"events": [row], "last": 1, "now": 1.0, "stage": 1, "term": 1}, 0.0, 0.0)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        None,
        {"events": [[]], "last": 1, "now": 1.0, "stage": 1, "term": 1},
        {"events": 3, "last": 1, "now": 1.0, "stage": 1, "term": 1},
        {"events": [], "last": 1, "now": "late", "stage": 1, "term": 1},
        {"events": [], "last": 1.5, "now": 1.0, "stage": 1, "term": 1},
    ],
)
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError):
        events_from_json(answer, 0.0, 0.0)
