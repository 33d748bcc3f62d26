"""A running factor between what was predicted and what was observed."""

from __future__ import annotations

import math

FORGET = 0.7
"""What the next observation leaves of the weight of those before it: the last three or so count."""
LARGEST = math.log(30.0)
"""Natural logarithm of the largest factor that one observation is believed."""


class RunningScale:
    """An exponentially forgetting mean of log ratios, and how far single ones were from it.

    It starts at 1 with the weight of one observation, so that the first does not decide alone.

    Args:
        error: Expected relative error before anything was observed.
    """

    def __init__(self, error: float) -> None:
        self._log = 0.0
        self._weight = 1.0
        self._error = error
        self._error_weight = 1.0

    @property
    def factor(self) -> float:
        """What predictions are to be multiplied by."""
        return math.exp(self._log)

    @property
    def error(self) -> float:
        """Mean relative error that predictions had when they were compared with observations."""
        return self._error

    def observe(self, predicted: float, observed: float) -> None:
        """Compare a time predicted without the factor with the time observed; both in seconds and positive."""
        ratio = max(-LARGEST, min(LARGEST, math.log(observed / predicted)))
        missed = abs(math.expm1(self._log - ratio))
        self._weight = FORGET * self._weight + 1.0
        self._log += (ratio - self._log) / self._weight
        self._error_weight = FORGET * self._error_weight + 1.0
        self._error += (missed - self._error) / self._error_weight
