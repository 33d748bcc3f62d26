"""Probing finds a link's rate and latency through bursts and costs that have nothing to do with either."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_accept.remote.probe import LARGEST_PROBE, filler, probe


class SimulatedLink:
    """A link behind a token bucket, with a constant cost per message; time passes only when something is sent."""

    def __init__(self, rate: float, latency: float, burst: float, overhead: float, jitter: float = 0.0) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self._rate = rate / 8
        self._fixed = 2 * latency + overhead
        self._burst = self._tokens = burst
        self._filled = 0.0
        self._jitter = jitter
        self._random = random.Random(0)

    def clock(self) -> float:
        return self.now

    def send(self, size: int) -> None:
        self.sizes.append(size)
        self._tokens = min(self._burst, self._tokens + (self.now - self._filled) * self._rate)
        seconds = max(0.0, (size - self._tokens) / self._rate)
        self._tokens = max(0.0, self._tokens - size)
        self._filled = self.now + seconds
        self.now += seconds + self._fixed + self._random.random() * self._jitter


@pytest.mark.parametrize(
    ("rate", "latency", "burst", "overhead", "seconds"),
    list(itertools.product([1e5, 1e6, 1e7, 1e9], [0.0, 0.02, 0.1], [0, 16_000, 100_000], [0.0, 0.005], [0.5, 2.0])),
)
def test_rate_and_latency(rate: float, latency: float, burst: float, overhead: float, seconds: float) -> None:
    link = SimulatedLink(rate, latency, burst, overhead)
    speed = probe(link.send, seconds, clock=link.clock)
    assert speed.bandwidth == pytest.approx(rate, rel=0.05)
    assert speed.latency == pytest.approx(latency + overhead / 2, abs=1e-9)
    assert max(link.sizes) <= LARGEST_PROBE


def test_scatter_is_averaged_out() -> None:
    link = SimulatedLink(1e7, 0.005, 32_000, 0.002, jitter=0.005)
    assert probe(link.send, 2.0, clock=link.clock).bandwidth == pytest.approx(1e7, rel=0.05)


@pytest.mark.parametrize(("rate", "burst"), [(1e6, 0), (1e7, 64_000), (1e8, 1_000_000)])
def test_the_time_is_kept_about(rate: float, burst: float) -> None:
    link = SimulatedLink(rate, 0.001, burst, 0.001)
    probe(link.send, 2.0, clock=link.clock)
    assert link.now < 3.0


def test_a_slow_link_is_measured_beyond_the_time() -> None:
    link = SimulatedLink(2e4, 0.3, 0, 0.0)
    assert probe(link.send, 0.5, clock=link.clock).bandwidth == pytest.approx(2e4, rel=0.05)


def test_a_link_that_takes_no_time() -> None:
    link = SimulatedLink(1e30, 0.0, 0, 0.0)
    speed = probe(link.send, 1.0, clock=link.clock)
    assert speed.bandwidth > 1e15
    assert speed.latency == 0.0


def test_the_largest_message_is_kept() -> None:
    link = SimulatedLink(1e9, 0.0, 0, 0.001)
    assert probe(link.send, 1.0, largest=50_000, clock=link.clock).bandwidth == pytest.approx(1e9, rel=0.05)
    assert max(link.sizes) == 50_000


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 300_000])
def test_filler_has_its_size(size: int) -> None:
    assert len(filler(size)) == size
