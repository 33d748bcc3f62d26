"""One emulated device, as the user states it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_accept.cli import parse_size

from .errors import EdgeError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

Rate = str | float | None
"""Bits per second, as a number or like ``4mbit``; None for no limit."""
Rates = Rate | tuple[Rate, Rate]
"""One rate for both directions, or one for what the host sends and one for what it receives."""


@dataclass(frozen=True)
class Host:
    """A device of the testbed.

    Attributes:
        name: Lower-case letters, digits and hyphens.
        rate: The rate of its link; a pair gives first what the host sends, then what it receives.
        delay: Seconds that every packet takes on this host's link, in each direction. Between two hosts the delays add.
        cpu: Percent of one core that all its processes get together; None for no limit.
        memory: Bytes of private memory that each of its processes may have, as a number or like ``1GiB``.
    """

    name: str
    rate: Rates = None
    delay: float = 0.0
    cpu: float | None = None
    memory: str | int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be emulated.

        Raises:
            EdgeError: Naming the host and the value.
        """
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", self.name):
            raise EdgeError(f"host name {self.name!r}: use up to 32 lower-case letters, digits and hyphens")
        if not 0 <= self.delay <= 10:
            raise EdgeError(f"host {self.name}: delay {self.delay} is not between 0 and 10 seconds")
        check_cpu(self.name, self.cpu)
        split_rates(self.name, self.rate)
        self.memory_bytes()

    def memory_bytes(self) -> int | None:
        """The memory limit in bytes."""
        if self.memory is None:
            return None
        try:
            return parse_size(self.memory)
        except ValueError as error:
            raise EdgeError(f"host {self.name}: memory {error}") from None


def check_cpu(name: str, percent: float | None) -> None:
    """Refuse a share that the kernel cannot give.

    Raises:
        EdgeError: If ``percent`` is below 5: a quota of 1 ms, the kernel's least, in 20 ms.
    """
    if percent is not None and not 5 <= percent <= 100_000:
        raise EdgeError(f"host {name}: a CPU share is at least 5 percent of one core, not {percent}")


def split_rates(name: str, rates: Rates) -> tuple[float | None, float | None]:
    """Bits per second that the host sends and receives; None for no limit."""
    sending, receiving = rates if isinstance(rates, tuple) else (rates, rates)
    return _bits(name, sending), _bits(name, receiving)


def _bits(name: str, rate: Rate) -> float | None:
    if rate is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmg]?)(?:bit)?\s*", str(rate).lower())
    bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 8_000 <= bits <= 100e9:
        raise EdgeError(f"host {name}: rate {rate!r} is not one from 8kbit to 100gbit; write it like 400kbit or 4mbit")
    return bits
