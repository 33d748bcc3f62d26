"""How fast bytes come in from one neighbour, over all its connections together."""

from __future__ import annotations

import time
from collections.abc import Callable


class Inflow:
    """Counts bytes, and the time in which they came, while at least one body is under way.

    What is under way on several connections shares the link, so that each alone would look slower than the link is.
    Where nothing is under way, time does not count; nor do the first bytes after that, which began to travel at a time
    that only the sender knows.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._under_way = 0
        self._last: float | None = None
        self._bytes = 0
        self._seconds = 0.0

    def begin(self) -> None:
        """A body begins to come in."""
        self._under_way += 1

    def arrived(self, nbytes: int) -> None:
        """Bytes of some body have arrived."""
        now = self._clock()
        if self._last is not None:
            self._bytes += nbytes
            self._seconds += now - self._last
        self._last = now

    def end(self) -> None:
        """A body is complete, or given up."""
        self._under_way -= 1
        if not self._under_way:
            self._last = None

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since the last call."""
        taken = self._bytes, self._seconds
        self._bytes, self._seconds = 0, 0.0
        return taken
