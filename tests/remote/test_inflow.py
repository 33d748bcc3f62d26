"""Inflow: the link's speed, however many connections share it."""

from __future__ import annotations

import pytest

from lightning_accept.remote.inflow import Inflow


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def feed(inflow: Inflow, clock: Clock, *arrivals: tuple[float, int]) -> None:
    for now, nbytes in arrivals:
        clock.now = now
        inflow.arrived(nbytes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_body_without_its_beginning(clock: Clock) -> None:
    inflow = Inflow(clock)
    inflow.begin()
    feed(inflow, clock, (5.0, 1000), (6.0, 400), (8.0, 600))
    inflow.end()
    assert inflow.take() == (1000, 3.0)
    assert inflow.take() == (0, 0.0)


def test_two_bodies_at_a_time_count_together(clock: Clock) -> None:
    inflow = Inflow(clock)
    inflow.begin()
    inflow.begin()
    feed(inflow, clock, (1.0, 100), (2.0, 100), (3.0, 100))
    inflow.end()
    assert inflow.take() == (200, 2.0)
    feed(inflow, clock, (4.0, 100))
    inflow.end()
    assert inflow.take() == (100, 1.0)


def test_idle_time_does_not_count(clock: Clock) -> None:
    inflow = Inflow(clock)
    for start in (0.0, 100.0):
        inflow.begin()
        feed(inflow, clock, (start, 100), (start + 1.0, 100))
        inflow.end()
    assert inflow.take() == (200, 2.0)
