"""Bringing the clocks of several devices together."""

from __future__ import annotations

from dataclasses import dataclass

_DRIFT = 5e-5
"""Seconds per second by which two devices' clocks may run apart: quartz without correction."""
_KEPT = 64


@dataclass(frozen=True)
class _Reading:
    at: float
    offset: float
    error: float


class ClockAlignment:
    """Translates another device's clock into this one's, as NTP does (RFC 5905): by question and answer.

    The other clock was read somewhere between question and answer; the middle is off by half of the time between them
    at most. A busy slow link makes that long, so an older but quicker answer may still be the better one.
    """

    def __init__(self) -> None:
        self._readings: list[_Reading] = []

    def add(self, sent: float, remote: float, received: float) -> None:
        """Take an answer into account.

        Args:
            sent: This clock at the question, in seconds.
            remote: The other clock in the answer.
            received: This clock at the answer.
        """
        middle = (sent + received) / 2
        self._readings.append(_Reading(remote, remote - middle, max(0.0, received - sent) / 2))
        if len(self._readings) > _KEPT:
            newest = self._readings[-1].at
            self._readings.remove(max(self._readings[:-1], key=lambda reading: _uncertainty(reading, newest)))

    @property
    def latest(self) -> float | None:
        """What the other clock showed in the last answer; None before the first."""
        return self._readings[-1].at if self._readings else None

    def here(self, remote: float) -> float:
        """This clock's time when the other one showed ``remote``.

        Raises:
            ValueError: If there was no answer yet.
        """
        return remote - self._best(remote).offset

    def error(self, remote: float) -> float:
        """Most seconds by which :meth:`here` may be off."""
        return _uncertainty(self._best(remote), remote)

    def _best(self, remote: float) -> _Reading:
        if not self._readings:
            raise ValueError("the other clock was never read")
        return min(self._readings, key=lambda reading: _uncertainty(reading, remote))


def _uncertainty(reading: _Reading, remote: float) -> float:
    return reading.error + _DRIFT * abs(remote - reading.at)
