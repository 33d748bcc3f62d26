"""Transmissions that share the devices' ways into the network, each at its fair share of the bandwidth."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Tag = TypeVar("Tag")

_DONE = 1e-12


@dataclass(eq=False)
class Flow(Generic[Tag]):
    """One transmission under way.

    Attributes:
        tag: What it is, for the caller.
        remaining: Bits still to be sent.
        limit: Bits per second that it can reach alone.
        over: What it shares with others: keys of the network's capacities.
        start: When it began, in seconds.
        rate: Bits per second at present.
    """

    tag: Tag
    remaining: float
    limit: float
    over: tuple[Hashable, ...]
    start: float
    rate: float = field(default=0.0, init=False)


class Network(Generic[Tag]):
    """Divides bandwidth among transmissions as TCP roughly does: max-min fair, recomputed whenever one begins or ends.

    Args:
        capacities: Bits per second of everything that is shared, such as a device's uplink.
    """

    def __init__(self, capacities: Mapping[Hashable, float]) -> None:
        self._capacities = dict(capacities)
        self._known: dict[tuple[tuple[float, tuple[Hashable, ...]], ...], tuple[float, ...]] = {}
        self._flows: list[Flow[Tag]] = []
        self._now = 0.0

    def begin(self, flow: Flow[Tag]) -> None:
        """Add a transmission that begins at ``flow.start``."""
        self._advance(flow.start)
        self._flows.append(flow)
        self._divide()

    def next_end(self) -> float | None:
        """When the next transmission ends if none begins before; None if there is none."""
        if not self._flows:
            return None
        return self._now + min(flow.remaining / flow.rate for flow in self._flows)

    def ended(self, now: float) -> list[Flow[Tag]]:
        """Take out the transmissions that end at ``now``, which :meth:`next_end` has told."""
        self._advance(now)
        least = min((flow.remaining / flow.rate for flow in self._flows), default=0.0)
        done = [flow for flow in self._flows if flow.remaining / flow.rate <= least + _DONE]
        self._flows = [flow for flow in self._flows if flow not in done]
        self._divide()
        return done

    def _divide(self) -> None:
        """Give every flow its rate. The same few flows meet again and again, so that most rates are known already."""
        key = tuple((flow.limit, flow.over) for flow in self._flows)
        rates = self._known.get(key)
        if rates is None:
            rates = self._known[key] = _share(self._flows, self._capacities)
        for flow, rate in zip(self._flows, rates, strict=True):
            flow.rate = rate

    def _advance(self, now: float) -> None:
        for flow in self._flows:
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - self._now))
        self._now = now


def _share(flows: Sequence[Flow[Tag]], capacities: Mapping[Hashable, float]) -> tuple[float, ...]:
    """Raise all rates together; a flow stops at its own limit, or where something that it uses is full."""
    left = dict(capacities)
    rates = [0.0] * len(flows)
    growing = list(range(len(flows)))
    while growing:
        users = {key: sum(key in flows[index].over for index in growing) for key in left}
        steps = [flows[index].limit - rates[index] for index in growing]
        steps += [left[key] / count for key, count in users.items() if count]
        step = max(0.0, min(steps))
        for index in growing:
            rates[index] += step
        for key, count in users.items():
            left[key] -= count * step
        full = {key for key, count in users.items() if count and left[key] <= 1e-9 * capacities[key]}
        growing = [
            index
            for index in growing
            if rates[index] < flows[index].limit * (1 - 1e-12) and not full.intersection(flows[index].over)
        ]
    return tuple(rates)
