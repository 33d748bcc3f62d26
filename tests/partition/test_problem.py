"""What the planner refuses to be asked."""

from __future__ import annotations

import math

import pytest

from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.times import AdditiveTimes

TIMES = AdditiveTimes([1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, "at least one device"),
        ({"devices": [Device("a", TIMES), Device("b", AdditiveTimes([1.0]))]}, "b has times for 1 layers, but a for 2"),
        ({"devices": [Device("a", TIMES, memory=-1)]}, "a: memory must not be negative"),
        ({"devices": [Device("a", TIMES, memory=math.nan)]}, "a: memory must not be negative"),
        ({"devices": [Device("a", TIMES, in_flight=0)]}, "at least 1"),
        ({"forward_bytes": [1, 1]}, "forward_bytes must hold 3 numbers for 2 layers, not 2"),
        ({"backward_bytes": []}, "backward_bytes must hold 3 numbers"),
        ({"weight_bytes": [1]}, "weight_bytes must hold 2 numbers"),
        ({"activation_bytes": [1, -1]}, "activation_bytes must not be negative"),
        ({"loss_time": math.inf}, "loss_time"),
        ({"state_copies": -1.0}, "state_copies"),
        ({"central_minimum": 3}, r"central_minimum must be in 0\.\.2"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    valid = {"devices": [Device("a", TIMES)], "forward_bytes": [0, 0, 0], "backward_bytes": [0, 0, 0]}
    with pytest.raises(ValueError, match=message):
        Problem(**{**valid, **options})


def test_memory() -> None:
    device = Device("a", TIMES, weight_versions=2, in_flight=3)
    problem = Problem([device], [0] * 3, [0] * 3, weight_bytes=[10, 20], activation_bytes=[1, 2], state_copies=1.0)
    assert problem.memory_prefix(0).tolist() == [0.0, 33.0, 99.0]
    assert problem.memory_alone() == 63.0
