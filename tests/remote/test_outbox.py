"""The outbox: numbered, bounded, kept until acknowledged."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lightning_accept.pipeline.messages import TransportError
from lightning_accept.remote.outbox import Outbox
from lightning_accept.remote.wire import pack_packet, unpack_packet


def test_items_are_numbered_and_kept_until_acknowledged(packet: Any) -> None:
    outbox = Outbox()
    assert outbox.peek(0) is None
    for job in range(3):
        outbox.send(packet(job))
    for after in (0, 0, 1, 2):
        number, frame = outbox.peek(after) or (0, b"")
        assert number == after + 1
        assert unpack_packet(frame).job == after
    assert outbox.peek(3) is None
    for outside in (2, 4):
        with pytest.raises(ValueError, match="cannot be acknowledged"):
            outbox.peek(outside)


def test_an_item_that_is_asked_for_ahead_drops_nothing(packet: Any) -> None:
    outbox = Outbox()
    for job in range(3):
        outbox.send(packet(job))
    assert (outbox.peek(2, received=0) or (0,))[0] == 3
    assert outbox.peek(3, received=1) is None
    assert (outbox.peek(1, received=0) or (0,))[0] == 2  # said before the other, but overtaken by it
    for after, received in ((0, 0), (2, 3), (4, 1)):
        with pytest.raises(ValueError, match="cannot be acknowledged"):
            outbox.peek(after, received)


@pytest.mark.parametrize("limits", [{"max_items": 2}, {"max_bytes": 2}])
def test_a_full_outbox_blocks_the_sender_until_items_are_acknowledged(packet: Any, limits: dict[str, int]) -> None:
    outbox = Outbox(**limits)
    room = limits.get("max_items", 1)
    for job in range(room):
        outbox.send(packet(job))
    done = threading.Event()

    def send() -> None:
        outbox.send(packet(room))
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    # Handing an item out makes no room, acknowledging it does.
    assert outbox.peek(0) is not None
    assert not done.is_set()
    outbox.peek(1)
    assert done.wait(30)
    thread.join()


def test_bytes_count_as_well_as_items(packet: Any) -> None:
    size = len(pack_packet(packet(0)))
    outbox = Outbox(max_items=10, max_bytes=3 * size)
    for job in range(3):
        outbox.send(packet(job))
    blocked = threading.Thread(target=outbox.send, args=(packet(3),))
    blocked.start()
    assert outbox.peek(1) is not None
    blocked.join(30)
    assert not blocked.is_alive()


def test_fetch_wakes_when_an_item_arrives(packet: Any) -> None:
    outbox = Outbox()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(outbox.fetch(0, 30.0)))
    thread.start()
    outbox.send(packet(5))
    thread.join(30)
    assert found[0][0] == 1


def test_listeners_hear_of_items_and_of_the_end(packet: Any) -> None:
    outbox = Outbox()
    heard: list[int] = []

    def listener() -> None:
        heard.append(1)

    outbox.subscribe(listener)
    outbox.send(packet(0))
    outbox.close()
    assert len(heard) == 2
    outbox.unsubscribe(listener)
    assert outbox.closed


def test_close_ends_a_blocked_send(packet: Any) -> None:
    outbox = Outbox(max_items=1)
    outbox.send(packet(0))
    errors: list[Exception] = []

    def send() -> None:
        try:
            outbox.send(packet(1))
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    outbox.close()
    thread.join(30)
    assert "the forward of job 1 was not fetched by the central node" in str(errors[0])
