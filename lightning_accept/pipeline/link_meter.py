"""LinkMeter: how fast a link is, told by the messages of training themselves."""

from __future__ import annotations

import statistics
import threading
from collections import deque

from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.messages import Transfer

SMALLEST_BYTES = 8 * 1024
SHORTEST_SECONDS = 0.002
_KEPT = 15


class LinkMeter:
    """The speed of one direction of a link, from its last transfers. Written by one thread, read by any.

    The fixed cost of a message does not count as bandwidth: a round trip is taken off. Transfers whose bytes take less
    time than the scatter of a round trip tell nothing about the bandwidth and are passed over. The median of the rest
    is unmoved by single transfers that were held up.

    Args:
        kept: Number of transfers that count; older ones are forgotten.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._rates: deque[float] = deque(maxlen=kept)
        self._round_trip = 0.0
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> None:
        """Take a transfer into account."""
        seconds = transfer.seconds - transfer.round_trip
        with self._lock:
            self._round_trip = transfer.round_trip
            telling = transfer.nbytes >= SMALLEST_BYTES and seconds >= max(SHORTEST_SECONDS, transfer.round_trip / 4)
            if telling:
                self._rates.append(8.0 * transfer.nbytes / seconds)

    @property
    def speed(self) -> Speed | None:
        """Bits per second and seconds of latency (half a round trip); None while no transfer told anything."""
        with self._lock:
            if not self._rates:
                return None
            return Speed(statistics.median(self._rates), self._round_trip / 2)

    @property
    def bandwidth(self) -> float | None:
        """Bits per second; None while no transfer told anything."""
        speed = self.speed
        return None if speed is None else speed.bandwidth
