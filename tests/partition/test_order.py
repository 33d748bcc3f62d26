"""The order of tasks, spelled out."""

from __future__ import annotations

import pytest

from lightning_accept.partition.order import Task, central_order, orders, staleness, stashed, worker_order
from lightning_accept.partition.schedule import Schedule


def short(order: list[Task]) -> str:
    """``F0 L0 B0`` for a forward, a loss, a backward."""
    return " ".join(f"{kind[0].upper()}{job}" for kind, job in order)


@pytest.mark.parametrize(
    ("schedule", "batches", "expected"),
    [
        (Schedule(1, (1,), 0), 2, "F0 L0 B0 F1 L1 B1"),
        (Schedule(4, (3,), 2), 5, "F0 F1 L0 F2 L1 F3 L2 B0 F4 L3 B1 L4 B2 B3 B4"),
        (Schedule(2, (3,), 1, 2), 3, "F0 F1 L0 F2 F3 L1 B0 B1 F4 F5 L2 B2 B3 B4 B5"),
        (Schedule(6, (3,), 3), 2, "F0 F1 L0 L1 B0 B1"),
    ],
)
def test_central_node(schedule: Schedule, batches: int, expected: str) -> None:
    assert short(central_order(schedule, batches)) == expected


def test_worker() -> None:
    assert short(worker_order(2, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert short(worker_order(9, 2)) == "F0 F1 B0 B1"


def test_the_synchronous_mode_drains_after_every_batch() -> None:
    central, worker = orders(Schedule(1, (2,), 0, 2), 2)
    assert short(central) == "F0 F1 L0 B0 B1 F2 F3 L1 B2 B3"
    assert short(worker) == "F0 F1 B0 B1 F2 F3 B2 B3"


def test_staleness_and_stash() -> None:
    central, first, second = orders(Schedule(4, (3, 2), 2), 20)
    assert [staleness(order, 1, 10) for order in (central, first, second)] == [3, 2, 1]
    assert [stashed(order) for order in (central, first, second)] == [4, 3, 2]
