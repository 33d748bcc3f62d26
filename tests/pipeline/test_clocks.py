"""ClockAlignment: no worse than the best answer, and it says how good that is."""

from __future__ import annotations

import random

import pytest

from lightning_accept.pipeline.clocks import ClockAlignment


def test_a_symmetric_answer_is_exact() -> None:
    clock = ClockAlignment()
    clock.add(sent=10.0, remote=1010.2, received=10.4)
    assert clock.here(1010.2) == pytest.approx(10.2)
    assert clock.here(1011.2) == pytest.approx(11.2)
    assert clock.error(1010.2) == pytest.approx(0.2)


def test_never_read() -> None:
    with pytest.raises(ValueError, match="never read"):
        ClockAlignment().here(0.0)
    assert ClockAlignment().latest is None


def test_the_error_bound_holds_whatever_the_network_does() -> None:
    rng = random.Random(0)
    clock, offset, drift = ClockAlignment(), 5000.0, 3e-5
    for number in range(500):
        sent = 10.0 * number
        there, back = rng.expovariate(2.0), rng.expovariate(2.0)
        clock.add(sent, (sent + there) * (1 + drift) + offset, sent + there + back)
    for here in (0.0, 1234.5, 4000.0, 5000.0):
        remote = here * (1 + drift) + offset
        assert abs(clock.here(remote) - here) <= clock.error(remote)
    # Of so many answers one was quick, and it is kept.
    newest = clock.latest
    assert newest is not None and clock.error(newest) < 0.15


def test_a_quick_answer_outweighs_newer_slow_ones() -> None:
    clock = ClockAlignment()
    clock.add(sent=0.0, remote=100.001, received=0.002)
    for number in range(1, 200):
        clock.add(sent=float(number), remote=100.0 + number + 1.9, received=number + 2.0)
    assert clock.here(250.0) == pytest.approx(150.0, abs=0.01)
