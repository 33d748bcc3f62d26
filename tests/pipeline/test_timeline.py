"""Timeline: which row an event belongs to, and which batches are kept."""

from __future__ import annotations

from lightning_accept.pipeline.events import Event
from lightning_accept.pipeline.timeline import Timeline, link_of


def compute(kind: str, start: float, batch: int, stage: int) -> Event:
    return Event(kind, start, start + 0.5, batch, batch, stage=stage)


def cross(kind: str, carries: str, stage: int, peer: int, batch: int = 0) -> Event:
    return Event(kind, 1.0, 2.0, batch, batch, 0, carries, peer, 10, stage)


def test_ways() -> None:
    assert link_of(cross("send", "forward", 0, 1)) == (0, 1, "down")
    assert link_of(cross("send", "forward", 1, 2)) == (1, 2, "down")
    assert link_of(cross("send", "forward", 2, 0)) is None  # only put ready there
    assert link_of(cross("receive", "forward", 0, 2)) == (2, 0, "down")
    assert link_of(cross("send", "backward", 0, 2)) == (0, 2, "up")
    assert link_of(cross("send", "backward", 2, 1)) == (2, 1, "up")
    assert link_of(cross("receive", "backward", 0, 1)) == (1, 0, "up")
    assert link_of(cross("encode", "forward", 0, 1)) is None
    assert link_of(compute("forward", 0.0, 0, 0)) is None


def test_one_worker_has_two_ways_to_the_central_node() -> None:
    timeline = Timeline(3)
    timeline.add([cross("receive", "forward", 0, 1), cross("receive", "backward", 0, 1)])
    assert list(timeline.links()) == [(1, 0, "down"), (1, 0, "up")]


def test_rows_in_the_order_of_the_chain() -> None:
    timeline = Timeline(3)
    crossing = [("backward", 0, 2), ("backward", 2, 1), ("forward", 1, 2), ("forward", 0, 1)]
    timeline.add([cross("send", carries, stage, peer) for carries, stage, peer in crossing])
    timeline.add([cross("receive", "backward", 0, 1), cross("receive", "forward", 0, 2)])
    ways = [(0, 1, "down"), (1, 2, "down"), (2, 0, "down"), (0, 2, "up"), (2, 1, "up"), (1, 0, "up")]
    assert list(timeline.links()) == ways


def test_old_batches_and_evaluation_are_left_out() -> None:
    timeline = Timeline(2)
    timeline.add([compute("forward", float(batch), batch, 1) for batch in range(5)])
    timeline.add([compute("evaluate", 9.0, 99, 1), cross("send", "evaluate", 0, 1, 99), compute("step", 9.0, 3, 0)])
    assert [(event.kind, event.batch) for event in timeline.events] == [("forward", 3), ("forward", 4), ("step", 3)]
    assert {stage: len(events) for stage, events in timeline.stages().items()} == {0: 1, 1: 2}
