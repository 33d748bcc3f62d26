"""Reports of stages, which arrive from other machines."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accept.pipeline.messages import Packet, PipelineError, StageReport, Transfer, reports_in

REPORT = StageReport(0.5, 1.0, 0.1, 1e6, None)


def test_reports_travel_as_json() -> None:
    assert REPORT.to_json() == {"forward": 0.5, "backward": 1.0, "step": 0.1, "down": 1e6, "up": None}
    assert reports_in({"times": {"2": REPORT.to_json(), "1": REPORT.to_json()}}) == {1: REPORT, 2: REPORT}
    assert reports_in({}) == {}


@pytest.mark.parametrize(
    "times",
    [
        [],
        {"one": REPORT.to_json()},
        {"1": None},
        {"1": [0.1, 0.2]},
        {"1": {"forward": 1.0}},
        {"1": {**REPORT.to_json(), "more": 1}},
        {"1": {**REPORT.to_json(), "forward": None}},
        {"1": {**REPORT.to_json(), "forward": "1"}},
        {"1": {**REPORT.to_json(), "backward": -1.0}},
        {"1": {**REPORT.to_json(), "step": float("nan")}},
        {"1": {**REPORT.to_json(), "down": float("inf")}},
        {"1": {**REPORT.to_json(), "up": True}},
    ],
)
def test_reports_that_are_none(times: Any) -> None:
    with pytest.raises(PipelineError, match="the gradient of batch 3 carries reports that make no sense"):
        reports_in({"batch": 3, "times": times})


def test_how_a_packet_came_is_no_part_of_it() -> None:
    assert Packet("forward", "run", 1, 0) == Packet("forward", "run", 1, 0, transfer=Transfer(1, 1.0))
