"""How fast a link is, found by sending over it what nobody needs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from lightning_accept.partition.link import Speed

LARGEST_PROBE = 16 * 2**20
"""Bytes of the largest message."""

LONGEST_PROBE = 30.0
"""Seconds for which one direction of a link is probed at most."""

_SMALLEST = 4 * 1024
_ENOUGH = 0.3
"""Seconds; a message that takes so long tells the bandwidth well."""
_EMPTY_MESSAGES = 4
_ROUNDS = 3
_SHORTEST = 1e-9

BLOCK = os.urandom(256 * 1024)
"""What is sent, over and over: nothing on the way can compress it."""


def filler(size: int) -> bytes:
    """``size`` bytes that cannot be compressed."""
    return (BLOCK * (size // len(BLOCK) + 1))[:size]


def probe(
    send: Callable[[int], object],
    seconds: float,
    *,
    largest: int = LARGEST_PROBE,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """The speed of one direction of a link.

    Empty messages tell the round trip. Then sizes grow fourfold until a message takes long enough. What follows
    alternates between a large message and one half as large: the difference of their times is free of all that a
    message costs besides its bytes.

    Args:
        send: Carries so many bytes over the link and returns once they have arrived; an empty one costs a round trip.
        seconds: What the measurement may take, about, its round trips left out. A link that is too slow for that is
            measured less well, but is measured.
        largest: Bytes of the largest message.
        clock: Seconds.

    Returns:
        Bits per second, and half a round trip as the latency.
    """
    messages = _Messages(send, clock)
    goal = max(min(_ENOUGH, seconds / 6), 4 * messages.round_trip)
    # The first time, a shaper may let a burst through; then its bucket is empty.
    for _ in range(2):
        size = min(_SMALLEST, largest)
        taken = messages.taken(size)
        while size < largest and taken < goal / 3:
            size = min(4 * size, largest)
            taken = messages.taken(size)
    rates = [size / max(taken, _SHORTEST)]
    # Three, so that the median is unmoved by one that was held up; fewer only if the link is too slow for that.
    while len(rates) <= _ROUNDS and (len(rates) == 1 or messages.busy < 2 * seconds):
        large = int(min(max(_SMALLEST, rates[-1] * goal), largest))
        difference = -messages.taken(large // 2) + messages.taken(large)
        rates.append((large - large // 2) / difference if difference > 0 else rates[-1])
    return Speed(8.0 * statistics.median(rates[1:]), messages.round_trip / 2)


class _Messages:
    """Sends messages and takes their times, from which the round trip is taken off."""

    def __init__(self, send: Callable[[int], object], clock: Callable[[], float]) -> None:
        self.busy = 0.0
        """Seconds spent on more than round trips."""
        self.round_trip = 0.0
        self._send = send
        self._clock = clock
        self.taken(0)  # opens the connection
        self.round_trip = min(self.taken(0) for _ in range(_EMPTY_MESSAGES))
        self.busy = 0.0

    def taken(self, size: int) -> float:
        begin = self._clock()
        self._send(size)
        seconds = max(0.0, self._clock() - begin - self.round_trip)
        self.busy += seconds
        return seconds
