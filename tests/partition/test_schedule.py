"""The schedule's rules and the default."""

from __future__ import annotations

import pytest

from lightning_accept.partition.schedule import Schedule, default_schedule


@pytest.mark.parametrize(
    ("workers", "in_flight", "micro_batches", "expected"),
    [
        (2, None, 1, Schedule(4, (3, 2), 2)),
        (1, None, 1, Schedule(3, (2,), 1)),
        (5, None, 1, Schedule(7, (6, 5, 4, 3, 2), 4)),
        (2, 6, 1, Schedule(6, (5, 4), 3)),
        (3, 2, 1, Schedule(2, (1, 1, 1), 1)),
        (2, 1, 1, Schedule(1, (1, 1), 0)),
        (2, 1, 4, Schedule(1, (4, 4), 0, 4)),
        (2, None, 4, Schedule(3, (8, 7), 1, 4)),
        (4, None, 2, Schedule(4, (6, 5, 4, 3), 2, 2)),
        (2, 4, 2, Schedule(4, (6, 5), 2, 2)),
        (0, None, 1, Schedule(2, (), 1)),
    ],
)
def test_default(workers: int, in_flight: int | None, micro_batches: int, expected: Schedule) -> None:
    assert default_schedule(workers, in_flight, micro_batches) == expected


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", range(7))
def test_every_default_can_be_built(workers: int, micro_batches: int) -> None:
    for in_flight in [None, *range(1, 10)]:
        schedule = default_schedule(workers, in_flight, micro_batches)
        assert len(schedule.windows) == workers
        assert schedule.forward_lead + schedule.backward_lag == schedule.in_flight
        assert schedule.forward_lead >= 1


def test_properties() -> None:
    schedule = Schedule(4, (3, 2), 1)
    assert (schedule.forward_lead, schedule.synchronous, schedule.largest_window) == (3, False, 4)
    assert schedule.staleness == (3, 2, 1)
    assert Schedule(1, (4, 4), 0, 4).synchronous
    assert Schedule(1, (4, 4), 0, 4).staleness == (0, 0, 0)


def test_staleness_counts_updates_not_jobs() -> None:
    assert Schedule(3, (9, 5, 4), 1, 4).staleness == (2, 2, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, (), 0, 1), "in_flight must be at least 1, not 0"),
        ((1, (), 0, 0), "micro_batches must be at least 1, not 0"),
        ((3, (2,), 3, 1), r"backward_lag must be in 0\.\.2 \(below in_flight\), not 3"),
        ((3, (2,), -1, 1), r"backward_lag must be in 0\.\.2"),
        ((4, (2, 3), 1, 1), "must not grow"),
        ((4, (3, 0), 1, 1), "each window must be at least"),
        ((4, (5, 3), 2, 2), None),
        ((4, (5, 1), 2, 2), "the loss needs all 2 micro-batches"),
        ((4, (5, 1), 2, 1), "at most 4; raise in_flight or lower the windows"),
        ((4, (8, 2), 2, 2), "at most 7"),
        ((1, (2, 2), 0, 1), "at most 1"),
    ],
)
def test_refuses_what_could_deadlock(arguments: tuple[int, tuple[int, ...], int, int], message: str | None) -> None:
    if message is None:
        Schedule(*arguments)
        return
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


def test_default_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="must not be negative, not -1"):
        default_schedule(-1)
    with pytest.raises(ValueError, match="micro_batches must be at least 1"):
        default_schedule(2, 4, 0)
    with pytest.raises(ValueError, match="in_flight must be at least 1"):
        default_schedule(2, 0)
