"""A message's cost, from how long a loop takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_accept.latency.interpreter import LOOPS_PER_MESSAGE, message_seconds


def ticking(tick: float) -> Callable[[], float]:
    """A clock that moves by ``tick`` with every look at it, that is, with every block of 2000 turns."""
    now = [0.0]

    def clock() -> float:
        now[0] += tick
        return now[0]

    return clock


@pytest.mark.parametrize("tick", [0.001, 0.02, 0.5])
def test_it_is_so_many_turns_of_the_loop(tick: float) -> None:
    assert message_seconds(ticking(tick)) == pytest.approx(tick / 2000 * LOOPS_PER_MESSAGE)


def test_it_ends_on_a_clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accept.latency.interpreter._MOST_BLOCKS", 3)
    assert message_seconds(lambda: 7.0) == 0.0


def test_it_is_plausible_here() -> None:
    assert 0 < message_seconds(ticking(1e-4)) < 1
