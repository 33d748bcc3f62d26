"""Random disturbances are repeatable."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accept.remote.disturb import RandomDisturbance


def test_the_same_seed_disturbs_the_same_packet_in_the_same_way(packet: Any) -> None:
    packets = [packet(job) for job in range(50)]
    first, second = (RandomDisturbance(3, max_delay=0.5, loss=0.3, duplicate=0.3) for _ in range(2))
    forwards = [first(item) for item in packets]
    assert [second(item) for item in reversed(packets)] == forwards[::-1]
    other = RandomDisturbance(4, max_delay=0.5, loss=0.3, duplicate=0.3)
    assert [other(item) for item in packets] != forwards


def test_rates_are_as_asked(packet: Any) -> None:
    disturb = RandomDisturbance(0, max_delay=2.0, loss=0.5, duplicate=0.2)
    found = [disturb(packet(job)) for job in range(2000)]
    assert 0.9 < sum(item.delay for item in found) / 2000 < 1.1
    assert max(item.delay for item in found) <= 2.0
    assert 0.9 < sum(item.losses for item in found) / 2000 < 1.1
    assert 0.2 < sum(item.duplicates for item in found) / 2000 < 0.3


@pytest.mark.parametrize("arguments", [{"max_delay": -1.0}, {"loss": 1.0}, {"duplicate": -0.1}])
def test_impossible_rates(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        RandomDisturbance(0, **arguments)
