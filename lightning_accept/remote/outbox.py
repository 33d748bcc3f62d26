"""What a worker addresses to the central node, kept until the central node has fetched it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lightning_accept.pipeline.messages import Packet, TransportError
from lightning_accept.remote.wire import pack_packet


class Outbox:
    """A channel to the central node, which runs no server and fetches instead.

    Items are numbered from 1 in the order of sending. Asking for the item after number N acknowledges all up to N, so a
    lost reply costs nothing but a repetition.
    """

    overlaps = False

    def __init__(self, max_items: int = 16, max_bytes: int = 64 * 2**20) -> None:
        """Hold at most ``max_items`` items and ``max_bytes`` bytes; one item of any size is always taken."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._acknowledged = 0
        self._closed = False
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> None:
        """Add ``packet``; block while there is no room. It has left when it is added.

        Raises:
            TransportError: If the outbox is closed.
        """
        frame = pack_packet(packet)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(len(frame)))
            if self._closed:
                raise TransportError(f"the {packet.kind} of job {packet.job} was not fetched by the central node")
            self._items.append(frame)
            self._bytes += len(frame)
            self._announce()

    def _has_room(self, size: int) -> bool:
        return not self._items or (len(self._items) < self._max_items and self._bytes + size <= self._max_bytes)

    def _announce(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def peek(self, after: int, received: int | None = None) -> tuple[int, bytes] | None:
        """The item after number ``after``, with its number, or None if there is none yet.

        Args:
            after: Number of an item that was handed out, or 0.
            received: All up to this number have arrived and are dropped; by default all up to ``after``. Requests may
                overtake each other, so it may be less than was said before.

        Raises:
            ValueError: If a number lies outside what was handed out and not yet dropped.
        """
        received = after if received is None else received
        with self._changed:
            if not (received <= after and self._acknowledged <= after <= self._acknowledged + len(self._items)):
                raise ValueError(
                    f"item {after} cannot be acknowledged, nor {received} received, after item {self._acknowledged}"
                )
            while self._acknowledged < received:
                self._bytes -= len(self._items.popleft())
                self._acknowledged += 1
            self._changed.notify_all()
            ahead = after - self._acknowledged
            return (after + 1, self._items[ahead]) if ahead < len(self._items) else None

    def fetch(self, after: int, timeout: float) -> tuple[int, bytes] | None:
        """As :meth:`peek`, but wait up to ``timeout`` seconds for an item."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._acknowledged + len(self._items) > after, timeout=timeout
            )
            return self.peek(after)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` from the sender's thread whenever an item arrives or the outbox closes."""
        with self._changed:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """End :meth:`subscribe`."""
        with self._changed:
            self._listeners.remove(listener)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Drop everything; a :meth:`send` in progress raises. Idempotent."""
        with self._changed:
            self._closed = True
            self._bytes = 0
            self._acknowledged += len(self._items)
            self._items.clear()
            self._announce()
