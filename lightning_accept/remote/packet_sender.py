"""Sends packets to one worker and tells how long each was on the link."""

from __future__ import annotations

import math
from urllib.parse import quote

from lightning_accept.pipeline.messages import Packet, Transfer
from lightning_accept.remote.peer import Peer, Reply
from lightning_accept.remote.wire import WAITED_HEADER

_EMPTY_MESSAGES = 3


class PacketSender:
    """Sends packets through ``peer``; used by one thread at a time."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._round_trip: float | None = None

    def send(self, packet: Packet, body: bytes) -> Transfer:
        """Send ``packet``, packed as ``body``; return once the worker has taken it.

        Before the first one, empty messages open the connection and tell the round trip.

        Raises:
            PipelineError: As :meth:`Peer.request`.
        """
        what = describe(packet)
        if self._round_trip is None:
            self._round_trip = min(self._empty(packet.run, what) for _ in range(_EMPTY_MESSAGES))
        reply = self._peer.request("POST", f"{run_path(packet.run)}/packets", what, body=body)
        seconds = max(0.0, reply.seconds - _waited(reply))
        self._round_trip = min(self._round_trip, seconds)
        return Transfer(len(body), seconds, self._round_trip)

    def close(self) -> None:
        """As :meth:`Peer.close`."""
        self._peer.close()

    def _empty(self, run: str, what: str) -> float:
        return self._peer.request("GET", f"{run_path(run)}/probe", what, query={"bytes": "0"}).seconds


def describe(packet: Packet) -> str:
    """A packet in words, for messages."""
    return f"the {packet.kind} of job {packet.job}"


def run_path(run: str) -> str:
    """Where a worker answers for ``run``."""
    return f"/runs/{quote(run, safe='')}"


def _waited(reply: Reply) -> float:
    """Seconds for which the worker had the whole packet but no room for it."""
    try:
        seconds = float(reply.headers.get(WAITED_HEADER, "0"))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0
