from __future__ import annotations

from typing import Any

import foresight
import pytest
from report import Report


def test_bursts_and_single_delays_do_not_blur_the_period() -> None:
    """Pairs of batches that end together, one pair every two seconds; once everything stood still for a minute."""
    times = [2.0 * (batch // 2) + (60.0 if batch > 12 else 0.0) for batch in range(40)]
    assert foresight.steady(times, 2) == 1.0


def test_too_few_batches_show_no_steady_state() -> None:
    with pytest.raises(ValueError, match="11 batches are too few to see a steady state with 4 in flight"):
        foresight.steady([float(batch) for batch in range(11)], 4)


def test_the_best_partition_is_the_one_with_the_shortest_period() -> None:
    """Ten batches each after the first five; filling and draining, four batches at either end, are slow."""
    seconds = [9.0] * 5
    for period in (3.0, 1.0, 2.0):
        seconds += [50.0] * 4 + [period] * 12 + [50.0] * 4
    times = [sum(seconds[:end]) for end in range(1, len(seconds) + 1)]
    batches = [5, 25, 45]
    tried: dict[str, Any] = {
        "times": times,
        "plans": [{"batch": 1, "in_flight": 2}, *({"batch": batch + 1, "in_flight": 4} for batch in batches)],
        "tried": [{"batch": batch, "starts": [1, batch]} for batch in batches],
    }
    report = Report("foresight")
    assert foresight._best(report, tried) == 1.0
    assert [row["period_s"] for row in report.rows["tried"]] == [3.0, 1.0, 2.0]
