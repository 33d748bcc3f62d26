"""Sends packets to one worker and tells how fast the link is."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from urllib.parse import quote

from lightning_accept.pipeline.messages import Packet, Transfer
from lightning_accept.remote.peer import Peer, Reply
from lightning_accept.remote.window import Window
from lightning_accept.remote.wire import PASSED_HEADER

_EMPTY_MESSAGES = 3
_CONNECTIONS = 2


class PacketSender:
    """Sends packets over two connections, so that the next one may leave before the last one is answered.

    Args:
        make_peer: Makes what sends over one connection at a time.
        back: The way back from the worker, which is told the round trip.
    """

    def __init__(self, make_peer: Callable[[], Peer], back: Window | None = None) -> None:
        self._window = Window()
        self._back = Window() if back is None else back
        self._peers = [make_peer() for _ in range(_CONNECTIONS)]
        # The one used last comes first: its connection is warm.
        self._idle: queue.LifoQueue[Peer] = queue.LifoQueue()
        for peer in self._peers:
            self._idle.put(peer)
        self._round_trip: float | None = None

    def send(self, packet: Packet, body: bytes, on_left: Callable[[], None] | None = None) -> Transfer:
        """Send ``packet``, packed as ``body``; return once the worker has taken it. From two threads at most.

        Before the first one, empty messages open the connection and tell the round trip.

        Returns:
            What the receiver has counted since the last answer, this packet's bytes but for its first ones included.

        Raises:
            PipelineError: As :meth:`Peer.request`.
        """
        what = describe(packet)
        peer = self._idle.get()
        try:
            if self._round_trip is None:
                self._round_trip = min(_empty(peer, packet.run, what) for _ in range(_EMPTY_MESSAGES))
            path, window = f"{run_path(packet.run)}/packets", self._window.nbytes
            query = None if window is None else {"window": str(window)}
            reply = peer.request("POST", path, what, query=query, body=body, on_left=on_left)
        finally:
            self._idle.put(peer)
        round_trip = self._round_trip = min(self._round_trip, reply.seconds)
        nbytes, seconds = _passed(reply)
        self._window.passed(nbytes, seconds, round_trip)
        self._back.passed(0, 0.0, round_trip)
        return Transfer(nbytes, seconds + round_trip, round_trip)

    def close(self) -> None:
        """As :meth:`Peer.close`."""
        for peer in self._peers:
            peer.close()


def describe(packet: Packet) -> str:
    """A packet in words, for messages."""
    return f"the {packet.kind} of job {packet.job}"


def run_path(run: str) -> str:
    """Where a worker answers for ``run``."""
    return f"/runs/{quote(run, safe='')}"


def _empty(peer: Peer, run: str, what: str) -> float:
    return peer.request("GET", f"{run_path(run)}/probe", what, query={"bytes": "0"}).seconds


def _passed(reply: Reply) -> tuple[int, float]:
    """Bytes and seconds that the receiver tells; none where it tells nothing that makes sense."""
    try:
        count, time = reply.headers.get(PASSED_HEADER, "0 0").split()
        nbytes, seconds = int(count), float(time)
    except ValueError:
        return 0, 0.0
    return (nbytes, seconds) if nbytes >= 0 and 0 <= seconds < math.inf else (0, 0.0)
