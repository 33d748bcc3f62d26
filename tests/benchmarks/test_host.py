from __future__ import annotations

from typing import Any

import pytest
from edge import EdgeError, Host, SlowLinks
from edge.host import split_rates


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (None, (None, None)),
        ("4mbit", (4e6, 4e6)),
        (("1.5mbit", "400kbit"), (1.5e6, 4e5)),
        ((None, 1e9), (None, 1e9)),
        ("1gbit", (1e9, 1e9)),
        (250_000, (250_000, 250_000)),
    ],
)
def test_rates_are_for_both_directions_or_for_each(rate: Any, expected: Any) -> None:
    assert split_rates("pi", rate) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "4mb"}, "pi: rate '4mb'.*write it like"),
        ({"rate": ("4mbit", "0mbit")}, "pi: rate '0mbit'"),
        ({"rate": "1bit"}, "8kbit"),
        ({"delay": -0.1}, "pi: delay -0.1"),
        ({"cpu": 2}, "pi: a CPU share is at least 5 percent"),
        ({"memory": "lots"}, "pi: memory 'lots' is not a size"),
        ({"name": "My Pi"}, "'My Pi': use up to 32 lower-case letters"),
    ],
)
def test_what_cannot_be_emulated_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgeError, match=message):
        Host(**{"name": "pi", **options})


def test_memory_is_in_bytes() -> None:
    assert Host("pi", memory="1GiB").memory_bytes() == 2**30
    assert Host("pi").memory_bytes() is None


def test_hosts_have_different_names() -> None:
    with pytest.raises(EdgeError, match="different names: pi pi"):
        SlowLinks([Host("pi"), Host("pi")])
