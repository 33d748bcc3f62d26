"""How long messages keep a link busy."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_accept.partition.link import Link


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3.0),
        ({"full_duplex": False}, 5.0),
        ({"forward_latency": 1.0, "backward_latency": 0.5}, 3.0),
        ({"forward_latency": 9.0, "full_duplex": False}, 5.0),
    ],
)
def test_busy(options: dict[str, float | bool], expected: float) -> None:
    busy = Link(8.0, 16.0, **options).busy(np.array([3.0]), np.array([4.0]))
    assert busy == pytest.approx([expected])


def test_a_perfect_link_takes_no_time() -> None:
    assert Link().busy(np.array([1e9]), np.array([1e9])).tolist() == [0.0]


def test_reversed() -> None:
    assert Link(1.0, 2.0, 3.0, 4.0, False).reversed() == Link(2.0, 1.0, 4.0, 3.0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "bandwidths must be above 0 bits per second, not 0.0 and 1.0; leave the device out"),
        ((1.0, float("nan")), "bandwidths"),
        ((1.0, 1.0, -1.0), "latencies"),
        ((1.0, 1.0, 0.0, float("inf")), "latencies"),
    ],
)
def test_refuses(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(*arguments)
