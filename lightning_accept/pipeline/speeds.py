"""Speeds: how fast every direction of every link is, measured before training and followed while training."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_accept.partition.link import Link, Speed

Way = tuple[int, int]
"""Source and target, devices by number (0 is the central node)."""


@dataclass
class Speeds:
    """Every direction of every link that was measured.

    Messages of training often share a device's way into the network, and then each meets only a part of what the link
    can do. What a link's transfers met first in a deployment therefore stands for what was measured, and later ones
    tell by how much the link has changed since.

    Attributes:
        known: By source and target.
        full_duplex: Whether both directions of a link work at the same time.
    """

    known: dict[Way, Speed] = field(default_factory=dict)
    full_duplex: bool = True
    _first: dict[Way, tuple[float, float]] = field(default_factory=dict)

    def link(self, source: int, target: int) -> Link:
        """The link between two devices; a direction that was never measured counts as infinitely fast."""
        unknown = Speed()
        there = self.known.get((source, target), unknown)
        back = self.known.get((target, source), unknown)
        # No message waits for the answer to the one before.
        return Link.between(there, back, self.full_duplex)

    def uplink(self, device: int) -> float:
        """Bits per second that a device sends at most: what its fastest way reaches; infinity if none is known."""
        return max(
            (speed.bandwidth for (source, _), speed in self.known.items() if source == device), default=_INFINITE
        )

    def downlink(self, device: int) -> float:
        """Bits per second that a device receives at most."""
        return max(
            (speed.bandwidth for (_, target), speed in self.known.items() if target == device), default=_INFINITE
        )

    def restart(self) -> None:
        """Another deployment begins, in which other messages share the links."""
        self._first.clear()

    def meet(self, source: int, target: int, bandwidth: float) -> None:
        """Take in the bandwidth (bits per second, above 0) that the last transfers of training have met."""
        way = source, target
        before = self.known.get(way, Speed())
        if way not in self._first:
            # Transfers cannot be faster than the link.
            measured = before.bandwidth if bandwidth < before.bandwidth < _INFINITE else bandwidth
            self._first[way] = (bandwidth, measured)
        first, measured = self._first[way]
        self.known[way] = Speed(measured * bandwidth / first, before.latency)


_INFINITE = float("inf")
