"""A link with a delay: a process between two TAP devices that holds every packet for a while.

    python delay.py SECONDS DEVICE DEVICE

Makes both devices, prints ``ready``, and carries packets until it is ended. Many kernels lack their own means to delay
packets, netem; TAP devices they have.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST = 65536
_AT_ONCE = 32
"""Packets taken from one device before the other has its turn."""


class Direction:
    """Packets on their way from one device to the other.

    Args:
        source: File descriptor to read from.
        target: File descriptor to write to.
        delay: Seconds.
    """

    def __init__(self, source: int, target: int, delay: float) -> None:
        self.source = source
        self._target = target
        self._delay = delay
        self._held: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float | None:
        """When the next packet leaves, by the monotonic clock; None if there is none."""
        return self._held[0][0] if self._held else None

    def take(self) -> None:
        """Hold what has come in."""
        due = time.monotonic() + self._delay
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                self._held.append((due, os.read(self.source, _LARGEST)))

    def deliver(self) -> None:
        """Send on what is due; a device that is down loses it, as a cable that is pulled does."""
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            with suppress(OSError):
                os.write(self._target, self._held.popleft()[1])


def open_tap(name: str) -> int:
    """Make the TAP device ``name`` in this process's network namespace; it lives as long as the descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def carry(here: int, there: int, delay: float) -> None:
    """Carry packets both ways, for ever."""
    directions = [Direction(here, there, delay), Direction(there, here, delay)]
    while True:
        dues = [direction.due for direction in directions if direction.due is not None]
        wait = max(0.0, min(dues) - time.monotonic()) if dues else None
        # select, unlike poll, waits to the microsecond.
        readable, _, _ = select.select([here, there], [], [], wait)
        for direction in directions:
            if direction.source in readable:
                direction.take()
            direction.deliver()


def main() -> None:
    """Run from the command line."""
    seconds, here, there = sys.argv[1:]
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)  # it stands for a cable, which no busy host slows down
    ends = open_tap(here), open_tap(there)
    print("ready", flush=True)
    carry(*ends, float(seconds))


if __name__ == "__main__":
    main()
