"""How many bytes may be under way on a connection at a time."""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from lightning_accept.pipeline.link_meter import SMALLEST_BYTES

LEAST, MOST = 8 * 1024, 64 * 2**20
_MARGIN = 1.5
_SLACK = 0.05
"""Seconds that a device may leave its connections alone, while others have its processor."""
_KEPT = 3


class Window:
    """What one direction of a link may have under way per connection: little more than what keeps the link busy.

    TCP sends ever more until the queue in front of a slow link overflows. What is lost then is sent again after pauses
    that double: at 0.4 Mbit/s, connections that share a link stood still for up to nine seconds. Where nothing
    overflows, nothing is lost, and short messages do not wait behind long ones.

    Half more than the bandwidth, over the shortest round trip and a little longer: a bandwidth that was found too low
    for once is found higher the next time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round_trip = float("inf")
        self._rates: deque[float] = deque(maxlen=_KEPT)

    def passed(self, nbytes: int, seconds: float, round_trip: float | None = None) -> None:
        """So many bytes have come through in ``seconds``; a round trip takes ``round_trip``, if that is known."""
        with self._lock:
            if round_trip is not None:
                self._round_trip = min(self._round_trip, round_trip)
            if nbytes >= SMALLEST_BYTES and seconds > 0:
                self._rates.append(nbytes / seconds)

    @property
    def nbytes(self) -> int | None:
        """What may be under way; None while bandwidth or round trip are unknown."""
        with self._lock:
            if not self._rates or self._round_trip == float("inf"):
                return None
            return round(min(MOST, max(LEAST, _MARGIN * max(self._rates) * (self._round_trip + _SLACK))))


def limit_received(connection: Any, nbytes: int | None) -> None:
    """Let so many bytes be under way towards this end of a connection, where the system can do that (Linux).

    Args:
        connection: The socket.
        nbytes: As :attr:`Window.nbytes`; None leaves it as it is.
    """
    option = getattr(socket, "TCP_WINDOW_CLAMP", None)
    if option is None or nbytes is None:
        return
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, option, nbytes)
