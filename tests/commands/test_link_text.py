"""Links on the command line."""

from __future__ import annotations

import pytest

from lightning_accept.commands.link_text import parse_link
from lightning_accept.partition.link import Link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10Mbit", Link(1e7, 1e7)),
        ("400kbit/s", Link(4e5, 4e5)),
        ("1Gbit:2.5mbit@5ms", Link(1e9, 2.5e6, 0.005, 0.005)),
        ("100bit@2s", Link(100.0, 100.0, 2.0, 2.0)),
        ("unlimited", Link()),
        ("unlimited:1Mbit@2us", Link(float("inf"), 1e6, 2e-6, 2e-6)),
    ],
)
def test_parses(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "fast", "10", "0Mbit", "10Mbyte", "-1Mbit", "10Mbit@5", "1:2:3"])
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_link(text)
