"""What a stage and its links did, and when."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = ("forward", "backward", "step", "loss", "evaluate", "encode", "send", "receive")
_KEPT = 8192
_CARRIED = ("", "forward", "backward", "evaluate", "flush", "step")


class Event(NamedTuple):
    """Something that took time.

    Attributes:
        kind: ``forward``, ``backward`` and ``step`` of a job, its ``loss`` (the central node only) and ``evaluate`` are
            computed; ``encode``, ``send`` and ``receive`` concern a link.
        start: Seconds, on the clock of the device where it happened.
        end: Likewise.
        job: Number of the job, -1 where there is none.
        batch: Number of the batch, -1 where there is none.
        micro: Number of the micro-batch.
        carries: Kind of the packet on the link, ``""`` if it is no link's event.
        peer: Number of the stage at the other end of the link, -1 if it is no link's event.
        nbytes: Bytes of encoded tensors on the link.
        stage: Number of the stage that it belongs to.
        term: Term in which it happened.
    """

    kind: str
    start: float
    end: float
    job: int = -1
    batch: int = -1
    micro: int = 0
    carries: str = ""
    peer: int = -1
    nbytes: int = 0
    stage: int = 0
    term: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class EventLog:
    """The last events of one stage, numbered from 1 in the order of recording. Used from several threads.

    Args:
        kept: Number of events that are kept.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._recorded = 0
        self._lock = threading.Lock()

    def record(self, event: Event) -> None:
        """Add an event; the oldest is dropped if there are too many."""
        with self._lock:
            self._events.append(event)
            self._recorded += 1

    def since(self, after: int) -> tuple[list[Event], int]:
        """What is kept of the events after number ``after``, and the number of the newest one."""
        with self._lock:
            new = max(0, self._recorded - after)
            kept = list(self._events)
            return kept[max(0, len(kept) - new) :] if new else [], self._recorded


@dataclass(frozen=True)
class EventReply:
    """What a worker answers when it is asked for events.

    Attributes:
        events: The events, on its own clock.
        last: Number of the newest one.
        term: Term of the stage that recorded them; numbers begin anew with every term. 0 if there is no stage.
        now: What its clock showed meanwhile, in seconds.
        sent: What the asking side's clock showed when it asked.
        received: And when the answer was there.
    """

    events: list[Event]
    last: int
    term: int
    now: float
    sent: float
    received: float


def events_to_json(events: list[Event], last: int, now: float, stage: int, term: int) -> dict[str, Any]:
    """A worker's events as a JSON object, short for the sake of slow links."""
    rows = [[*event[:1], round(event.start, 6), round(event.seconds, 6), *event[3:9]] for event in events]
    return {"events": rows, "last": last, "now": now, "stage": stage, "term": term}


def no_events() -> dict[str, Any]:
    """The answer of a worker without a stage: its clock, in seconds."""
    return events_to_json([], 0, time.perf_counter(), 0, 0)


def events_from_json(answer: Any, sent: float, received: float) -> EventReply:
    """The inverse of :func:`events_to_json`.

    Raises:
        ValueError: If it is not what a worker answers.
    """
    try:
        stage, term, last, now = (answer[name] for name in ("stage", "term", "last", "now"))
        if not all(_whole(value) for value in (stage, term, last)) or not _seconds(now):
            raise ValueError("its numbers make no sense")
        events = [_event(row, stage, term) for row in answer["events"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"something is missing: {error}") from error
    return EventReply(events, last, term, now, sent, received)


def _event(row: Any, stage: int, term: int) -> Event:
    kind, start, seconds, job, batch, micro, carries, peer, nbytes = row
    whole = all(_whole(value) for value in (job, batch, micro, peer, nbytes))
    if kind not in KINDS or carries not in _CARRIED or not whole or not _seconds(start) or not _seconds(seconds):
        raise ValueError(f"{row!r} is no event")
    return Event(kind, start, start + seconds, job, batch, micro, carries, peer, nbytes, stage, term)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
