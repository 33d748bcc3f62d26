"""Links as they are written on the command line: ``10Mbit``, ``10Mbit:1Mbit@5ms``."""

from __future__ import annotations

import re

from lightning_accept.partition.link import Link, Speed

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)bit(?:/s)?", re.IGNORECASE)
_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str) -> Link:
    """A link from ``RATE[:RATE][@DELAY]``: there, back if it differs, and one way's delay; or ``unlimited``.

    Raises:
        ValueError: If it is none.
    """
    rates, _, delay = text.strip().partition("@")
    there, _, back = rates.partition(":")
    latency = _delay(delay, text) if delay else 0.0
    forward, backward = (Speed(_rate(way, text), latency) for way in (there, back or there))
    return Link.between(forward, backward)


def _rate(part: str, text: str) -> float:
    if part.strip().lower() == "unlimited":
        return float("inf")
    match = _RATE.fullmatch(part.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a link; write it like 10Mbit, 10Mbit:1Mbit@5ms or unlimited")
    return float(match[1]) * _RATES[match[2].lower()]


def _delay(part: str, text: str) -> float:
    match = _DELAY.fullmatch(part.strip())
    if match is None:
        raise ValueError(f"{part!r} in {text!r} is not a delay; write it like 5ms")
    return float(match[1]) * _DELAYS[match[2]]
