"""A link's speed from transfers: without what messages cost besides their bytes, and without outliers."""

from __future__ import annotations

import random

import pytest

from lightning_accept.pipeline.link_meter import LinkMeter
from lightning_accept.pipeline.messages import Transfer


def transfer(nbytes: int, rate: float, round_trip: float = 0.0, delay: float = 0.0) -> Transfer:
    return Transfer(nbytes, 8 * nbytes / rate + round_trip + delay, round_trip)


def test_nothing_is_known_at_first() -> None:
    meter = LinkMeter()
    assert meter.speed is None
    assert meter.bandwidth is None


@pytest.mark.parametrize("round_trip", [0.0, 0.01, 0.2])
def test_the_round_trip_is_no_part_of_the_bandwidth(round_trip: float) -> None:
    meter = LinkMeter()
    meter.add(transfer(100_000, 1e6, round_trip))
    speed = meter.speed
    assert speed is not None
    assert speed.bandwidth == pytest.approx(1e6)
    assert speed.latency == round_trip / 2
    assert meter.bandwidth == speed.bandwidth


@pytest.mark.parametrize(
    "useless",
    [
        Transfer(0, 1.0),
        transfer(8_000, 1e3),  # small
        transfer(20_000, 1e9),  # over in a moment
        transfer(20_000, 1e7, round_trip=0.1),  # a round trip's scatter exceeds it
        Transfer(100_000, 0.0, 0.1),
    ],
)
def test_transfers_that_tell_nothing_are_passed_over(useless: Transfer) -> None:
    meter = LinkMeter()
    meter.add(useless)
    assert meter.bandwidth is None
    meter.add(transfer(100_000, 1e6))
    meter.add(useless)
    assert meter.bandwidth == pytest.approx(1e6)


def test_transfers_that_were_held_up_do_not_move_it() -> None:
    meter, chance = LinkMeter(), random.Random(0)
    for number in range(30):
        held_up = 3.0 if number % 4 == 0 else 0.0
        meter.add(transfer(100_000, 1e6, 0.01, delay=chance.uniform(0, 0.005) + held_up))
    assert meter.bandwidth == pytest.approx(1e6, rel=0.02)


def test_old_transfers_are_forgotten() -> None:
    meter = LinkMeter(kept=5)
    for _ in range(20):
        meter.add(transfer(100_000, 1e6))
    for _ in range(5):
        meter.add(transfer(100_000, 2e5))
    assert meter.bandwidth == pytest.approx(2e5)
