"""The rows of a pipeline's timeline: one per stage and one per way of a link."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_accept.pipeline.events import Event

COMPUTED = ("forward", "backward", "step", "loss", "evaluate")
"""Kinds of events that occupy a stage; on one stage they do not overlap."""


def link_of(event: Event) -> tuple[int, int, str] | None:
    """The way of a link that an event occupied: from which stage, to which, ``down`` or ``up``; None for any other.

    What a worker addresses to the central node is only put ready there and then fetched, so that ``receive`` tells
    when it travelled; on all other ways it is ``send``.
    """
    way = "up" if event.carries in ("backward", "step") else "down"
    if event.kind == "receive":
        return event.peer, event.stage, way
    if event.kind == "send" and event.peer != 0:
        return event.stage, event.peer, way
    return None


def _of_evaluation(event: Event) -> bool:
    return "evaluate" in (event.kind, event.carries)


class Timeline:
    """The events of the last batches.

    Args:
        batches: Number of batches that are kept.
    """

    def __init__(self, batches: int) -> None:
        self._kept = batches
        self._events: list[Event] = []

    def add(self, events: Iterable[Event]) -> None:
        """Take in newer events, and forget those of batches that are too old. Evaluation has no place here."""
        self._events += [event for event in events if event.batch >= 0 and not _of_evaluation(event)]
        if self._events:
            newest = max(event.batch for event in self._events)
            self._events = [event for event in self._events if event.batch > newest - self._kept]

    def clear(self) -> None:
        """Forget all."""
        self._events = []

    @property
    def events(self) -> list[Event]:
        """The events, by their start."""
        return sorted(self._events, key=lambda event: event.start)

    def stages(self) -> dict[int, list[Event]]:
        """What occupied each stage, by its number."""
        rows: dict[int, list[Event]] = {}
        for event in self.events:
            if event.kind in COMPUTED:
                rows.setdefault(event.stage, []).append(event)
        return dict(sorted(rows.items()))

    def links(self) -> dict[tuple[int, int, str], list[Event]]:
        """What occupied each way of each link: all that goes down the chain, then all that goes up."""
        rows: dict[tuple[int, int, str], list[Event]] = {}
        for event in self.events:
            way = link_of(event)
            if way is not None:
                rows.setdefault(way, []).append(event)
        down = sorted((way for way in rows if way[2] == "down"), key=lambda way: way[0])
        up = sorted((way for way in rows if way[2] == "up"), key=lambda way: (way[0] != 0, -way[0]))
        return {way: rows[way] for way in (*down, *up)}
