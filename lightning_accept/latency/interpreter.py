"""How long a device's interpreter takes for one message between stages, the tensors left out."""

from __future__ import annotations

from lightning_accept.latency.timing import Clock

LOOPS_PER_MESSAGE = 13_000
"""Turns of the loop below in the CPU time of one message: 1.1 ms against 85 ns, both measured on x86-64.

What a worker's process uses per batch beyond the layers, over the four messages that it takes and sends. All of it is
interpreter's work (HTTP, JSON, threads), so that it grows with the loop on slower devices.
"""

_BLOCK = 2_000
_MOST_BLOCKS = 5_000
SHORTEST = 0.25
"""Seconds: long against the period of a CPU quota, within which a process is either at full speed or stopped."""


def message_seconds(clock: Clock) -> float:
    """Seconds of one message on this device, by how long a fixed loop takes.

    Args:
        clock: Tells seconds.
    """
    began, passed = clock(), 0.0
    blocks = 0
    while blocks == 0 or (passed < SHORTEST and blocks < _MOST_BLOCKS):
        _turn(_BLOCK)
        blocks += 1
        passed = clock() - began
    return passed / (blocks * _BLOCK) * LOOPS_PER_MESSAGE


def _turn(count: int) -> None:
    kept: dict[int, str] = {}
    for number in range(count):
        kept[number & 63] = str(number)
