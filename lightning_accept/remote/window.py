"""How many bytes may be under way to and from a peer at a time."""

from __future__ import annotations

import socket
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

LEAST = 8 * 1024
_MOST = 64 * 2**20
_UNLIMITED = 256 * 1024
"""Bytes from which on the system finds a connection's window itself, as it does while nothing is known."""
_SMALLEST_MESSAGE = 8 * 1024
_MARGIN = 1.5
_UNKNOWN_ROUND_TRIP = 0.1
_SLACK = 0.05
"""Seconds that a device may leave its connections alone, while others have its processor."""
_KEPT = 3
_DIRECTIONS = {
    "there": (socket.SOL_SOCKET, socket.SO_SNDBUF),
    "back": (socket.IPPROTO_TCP, getattr(socket, "TCP_WINDOW_CLAMP", None)),  # Linux
}


class Window:
    """Limits what the connections to one peer keep under way, to little more than what keeps the link busy.

    TCP sends ever more until the queue in front of a slow link overflows. What is lost then is sent again after pauses
    that double: at 0.4 Mbit/s, connections that share a link stood still for up to seven seconds. Where nothing
    overflows, nothing is lost, and short messages do not wait behind long ones.

    Half more than the bandwidth, over the shortest round trip and a little longer: a bandwidth that was found too low
    for once is found higher the next time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round_trip = float("inf")
        self._rates = {name: deque[float](maxlen=_KEPT) for name in _DIRECTIONS}
        self._fitted: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def sent(self, nbytes: int, seconds: float, round_trip: float) -> None:
        """So many bytes have passed to the peer in ``seconds``, as it tells; a round trip takes ``round_trip``."""
        with self._lock:
            self._round_trip = min(self._round_trip, round_trip)
        self._learn("there", nbytes, seconds)

    def received(self, nbytes: int, seconds: float) -> None:
        """So many bytes have come from the peer in ``seconds``."""
        self._learn("back", nbytes, seconds)

    def nbytes(self, direction: str) -> int | None:
        """What may be under way ``there`` or ``back``; None while nothing is known of that way."""
        with self._lock:
            rates = self._rates[direction]
            if not rates:
                return None
            seconds = _SLACK + (self._round_trip if self._round_trip < float("inf") else _UNKNOWN_ROUND_TRIP)
            return round(min(_MOST, max(LEAST, _MARGIN * max(rates) * seconds)))

    def fit(self, connection: Any) -> None:
        """Limit one connection by what is known now."""
        for name, (level, option) in _DIRECTIONS.items():
            wanted = self.nbytes(name)
            if option is None or wanted is None or not self._changes(connection, name, wanted):
                continue
            with suppress(OSError):
                connection.setsockopt(level, option, wanted)

    def _changes(self, connection: Any, direction: str, wanted: int) -> bool:
        """Whether a connection's limit must be set, which is taken note of."""
        with self._lock:
            limits = self._fitted.setdefault(connection, {})
            before = limits.get(direction)
            if wanted >= _UNLIMITED if before is None else before <= wanted <= 1.5 * before:
                return False
            limits[direction] = wanted
            return True

    def _learn(self, direction: str, nbytes: int, seconds: float) -> None:
        if nbytes >= _SMALLEST_MESSAGE and seconds > 0:
            with self._lock:
                self._rates[direction].append(nbytes / seconds)
