"""The order of work on one stage."""

from __future__ import annotations

import pytest

from lightning_accept.pipeline.order import OneForwardOneBackward


def run(order: OneForwardOneBackward, steps: int) -> list[str]:
    done = []
    for _ in range(steps):
        action = order.next()
        order.done(action)
        done.append(f"{action[0][0].upper()}{action[1]}")
    return done


def test_window_of_forwards_first_then_strictly_alternating() -> None:
    assert run(OneForwardOneBackward(3), 9) == ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "F5"]


def test_window_of_one_is_sequential() -> None:
    assert run(OneForwardOneBackward(1), 4) == ["F0", "B0", "F1", "B1"]


def test_flush_leaves_only_backwards_and_then_begins_anew() -> None:
    order = OneForwardOneBackward(3)
    order.flush(4)
    assert run(order, 8) == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert run(order, 4) == ["F4", "F5", "F6", "B4"]


def test_flush_before_the_window_is_full() -> None:
    order = OneForwardOneBackward(3)
    order.done(("forward", 0))
    assert order.next() == ("forward", 1)
    order.flush(1)
    assert order.next() == ("backward", 0)


def test_flush_with_nothing_in_flight_changes_nothing() -> None:
    order = OneForwardOneBackward(2)
    order.flush(0)
    assert run(order, 3) == ["F0", "F1", "B0"]


def test_two_flushes_one_after_the_other() -> None:
    order = OneForwardOneBackward(4)
    order.flush(2)
    order.flush(2)
    order.flush(3)
    assert run(order, 6) == ["F0", "F1", "B0", "B1", "F2", "B2"]


@pytest.mark.parametrize("early", [True, False])
def test_the_order_does_not_depend_on_when_a_flush_is_announced(early: bool) -> None:
    order = OneForwardOneBackward(2)
    if early:
        order.flush(3)
    done = run(order, 4)
    if not early:
        order.flush(3)
    assert done + run(order, 2) == ["F0", "F1", "B0", "F2", "B1", "B2"]


def test_a_flush_below_what_is_done_is_refused() -> None:
    order = OneForwardOneBackward(1)
    run(order, 4)
    with pytest.raises(ValueError, match="too late"):
        order.flush(1)


def test_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="out of order"):
        OneForwardOneBackward(2).done(("backward", 0))


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        OneForwardOneBackward(0)
