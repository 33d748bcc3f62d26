"""Dataloaders read ahead of Lightning's loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_accept.pipeline.lookahead import Feed, Handle, LookAheadLoader, begin_ahead


class Loader:
    """Counts what is read; stateful like torchdata's."""

    batch_size = 7

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.read = number + 1
            yield number

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}


def begin(handle: Handle, ahead: int) -> bool:
    handle.ticket = object()  # type: ignore[assignment]
    handle.step = object()  # type: ignore[assignment]
    return True


def test_batches_come_in_order_and_end() -> None:
    assert [handle.raw for handle in Feed(Loader(4))] == [0, 1, 2, 3]
    feed = Feed(Loader(0))
    assert list(feed) == []
    assert feed.exhausted
    assert feed.following(0) is None


def test_nothing_is_read_before_it_is_asked_for() -> None:
    loader = Loader(9)
    feed = Feed(loader)
    assert loader.read == 0
    feed.take(next(feed))
    assert loader.read == 1
    following = feed.following(2)
    assert following is not None
    assert (following.raw, loader.read) == (3, 4)
    assert next(feed).raw == 1
    assert loader.read == 4


def test_lightning_may_hold_one_batch_that_is_not_in_hand() -> None:
    """Where there is no length it fetches one ahead to know which is the last."""
    feed = Feed(Loader(4))
    first, second = next(feed), next(feed)
    feed.take(first)
    assert feed.following(0) is second
    assert next(feed).raw == 2
    feed.take(second)
    assert feed.taken == 2
    feed.take(second)
    assert feed.taken == 2


def test_begin_ahead_begins_the_batch_in_hand_and_those_after_it_once() -> None:
    feed = Feed(Loader(6))
    begun: list[tuple[int, int]] = []

    def note(handle: Handle, ahead: int) -> bool:
        begun.append((handle.raw, ahead))
        return begin(handle, ahead)

    assert begin_ahead(next(feed), 2, note)
    assert begun == [(0, 0), (1, 1), (2, 2)]
    assert begin_ahead(next(feed), 2, note)
    assert begun[3:] == [(3, 2)]
    for _ in range(2):
        assert begin_ahead(next(feed), 2, note)
    assert not begin_ahead(next(feed), 2, note)
    assert [raw for raw, _ in begun] == [0, 1, 2, 3, 4, 5]


def test_begin_ahead_stops_at_a_batch_that_must_wait_for_its_turn() -> None:
    feed = Feed(Loader(6))
    assert not begin_ahead(next(feed), 4, lambda handle, ahead: handle.raw != 2 and begin(handle, ahead))
    third = feed.following(1)
    assert third is not None
    assert not third.begun


def test_a_batch_without_a_feed_is_begun_alone() -> None:
    handle = Handle(None, 5)
    assert not begin_ahead(handle, 3, begin)
    assert handle.begun
    assert begin_ahead(handle, 0, begin)


def test_started_steps_are_those_that_are_not_in_hand() -> None:
    feed = Feed(Loader(6))
    handle = next(feed)
    begin_ahead(handle, 2, begin)
    assert len(feed.started()) == 2
    assert handle.step not in feed.started()


def as_lightning_does(loader: Any, feeds: list[Feed]) -> Feed:
    """Begin a pass in the way of Lightning's loops."""
    iter(CombinedLoader(loader, "max_size_cycle"))
    return feeds[-1]


def test_the_loader_stands_in_for_the_one_it_wraps() -> None:
    feeds: list[Feed] = []
    inner = Loader(5)
    loader: Any = LookAheadLoader(inner, feeds.append)
    assert len(loader) == 5
    assert loader.batch_size == 7
    loader.batch_size = 8
    assert inner.batch_size == 8
    with pytest.raises(AttributeError):
        _ = loader.nothing
    first, second = as_lightning_does(loader, feeds), as_lightning_does(loader, feeds)
    assert feeds == [first, second]
    assert isinstance(next(first), Handle)
    assert next(iter(loader)) == next(iter(inner)), "others than Lightning get batches"
    assert len(feeds) == 2


def test_state_is_that_of_the_batch_in_hand_however_far_was_read() -> None:
    feeds: list[Feed] = []
    loader: Any = LookAheadLoader(Loader(9), feeds.append)
    assert loader.state_dict() == {"read": 0}
    feed = as_lightning_does(loader, feeds)
    begin_ahead(next(feed), 4, begin)
    assert loader.state_dict() == {"read": 1}
    begin_ahead(next(feed), 4, begin)
    assert loader.state_dict() == {"read": 2}
