"""Training time against bandwidth: the arithmetic, and one short cell."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import bandwidth
import pytest
import tables
import until
from report import Report

PLAN: dict[str, Any] = {
    "period": 1.1,
    "bound": 1.0,
    "bottleneck": "stage 1 (pi-1)",
    "starts": [3, 5],
    "workers": [0, 1],
    "in_flight": 2,
    "micro_batches": 2,
    "stages": [{"network": 0.3}, {"network": 0.9}, {"network": 0.2}],
    "links": [{"seconds": 0.4, "forward_bytes": 100, "backward_bytes": 50}] * 2,
}
END: dict[str, Any] = {
    "rest_seconds": 0.25,
    "stages": {
        "0": {"forward": 0.1, "backward": 0.2, "step": 0.1},
        "1": {"forward": 0.1, "backward": 0.3, "step": 0.05},
        "2": {"forward": 0.01, "backward": 0.02, "step": 0.0},
    },
}


def command_line(*given: str) -> argparse.Namespace:
    sys_argv, sys.argv = sys.argv, ["bandwidth.py", *given]
    try:
        return bandwidth.parse()
    finally:
        sys.argv = sys_argv


def test_enough_batches() -> None:
    """Two in flight and four more do not count; six must follow, and ten are enough, or those of five seconds."""
    times = [float(batch) for batch in range(20)]
    assert until.enough(times[:11], 2, 10, 5.0) is None
    assert until.enough(times[:12], 2, 10, 5.0) == (6, 12)
    assert until.enough(times[:12], 2, 10, 50.0) is None
    assert until.enough(times[:16], 2, 10, 50.0) == (6, 16)
    assert until.enough(times[:16], 4, 1, 0.0) is None
    assert until.enough(times, 4, 1, 0.0) == (8, 20)


def test_the_bound_that_was_measured() -> None:
    assert bandwidth.measured_bound(PLAN, END) == pytest.approx(0.95)  # stage 0: two micro-batches, step, rest
    slow = {**PLAN, "stages": [{"network": 0.3}, {"network": 2.5}, {"network": 0.2}]}
    assert bandwidth.measured_bound(slow, END) == 2.5
    assert bandwidth.measured_bound({**PLAN, "micro_batches": 1}, END) == pytest.approx(0.9)  # the middle's network


def test_figures_of_a_steady_state() -> None:
    """Warm-up and drain are as slow as they like; two batches end together every two seconds."""
    times = [100.0 * batch for batch in range(6)]
    times += [times[-1] + 100 + 2.0 * (batch // 2) for batch in range(12)]
    times += [times[-1] + 100.0]
    found = bandwidth.steady_figures({"plans": [PLAN], "end": END, "times": times, "steady": [6, 18]})
    assert found["seconds"] == found["low"] == found["high"] == 1.0
    assert found["batches"] == 12
    assert found["over_bound"] == 1.0
    assert found["over_planned"] == pytest.approx(1 / 1.1)
    assert found["over_measured_bound"] == pytest.approx(1 / 0.95)
    assert found["bytes_per_batch"] == 300


def test_figures_of_the_way_to_a_target() -> None:
    curve = [{"seconds": 10.0 * n, "batches": 31 * n, "accuracy": 0.3 * n} for n in (1, 2, 3)]
    found = bandwidth.target_figures({"curve": curve, "plans": [PLAN]}, 0.5)
    assert (found["seconds"], found["batches"], found["best_accuracy"]) == (20.0, 62, pytest.approx(0.9))
    missed = bandwidth.target_figures({"curve": curve, "plans": [PLAN]}, 0.95)
    assert (missed["seconds"], missed["trained_seconds"]) == (None, 30.0)


def row(rate: float, method: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    common = {"part": "mnist", "scenario": "A", "shares": [75, 50, 25], "batch": 128, "depth": "auto"}
    if seconds is None:
        return {**common, "rate": rate, "method": method, "error": "EdgeError: broken"}
    figures = {"seconds": seconds, "over_bound": 1.05, "bound": seconds / 1.05, "in_flight": 4, "starts": [3, 5]}
    figures["over_measured_bound"] = 1.02
    return {**common, "rate": rate, "method": method, **figures, **more}


def test_speed_ups_are_those_in_the_same_cell() -> None:
    report = Report("bandwidth")
    rows = [row(0.4, "ftpipehd", 6.0), row(0.4, "accept", 2.0), row(1, "ftpipehd", 3.0), row(1, "accept", 2.0)]
    rows += [row(0.4, "ours", None), row(1, "ours", 1.0, over_bound=1.2)]
    report.rows["mnist"] = rows
    bandwidth.sum_up(report)
    assert [row.get("speedup") for row in rows] == [1.0, 3.0, None, 1.0, 1.5, 3.0]
    assert report.figures == {
        "mnist: accept, times as fast at 0.4 Mbit/s, least": 3.0,
        "mnist: within 1.10 of the bound": "4 of 5",
        "mnist: within 1.10 of the measured bound": "5 of 5",
        "mnist: cells that failed": 1,
    }
    text = tables.bandwidth({"rows": report.rows, "figures": report.figures})
    assert "| 0.4 | 6.000 (1.00) | 2.000 (3.00) | failed |" in text
    assert "| 1 | 1.05 / 1.02 (4; 3, 5) | 1.05 / 1.02 (4; 3, 5) | 1.20 / 1.02 (4; 3, 5) |" in text


def test_cells_that_are_asked_for() -> None:
    assert len(list(bandwidth.cells(command_line("mnist")))) == 60
    assert len(list(bandwidth.cells(command_line("activity")))) == 25
    assert len(list(bandwidth.cells(command_line("target")))) == 6
    chosen = list(bandwidth.cells(command_line("mnist", "--scenarios", "B", "--rates", "3", "--methods", "ours")))
    assert chosen == [bandwidth.Cell("mnist", "B", 3.0, "ours")]
    assert chosen[0].setting().rates == ("3000000bit",) * 3
    assert all(sum(part.scenarios[name]) <= 170 for part in bandwidth.PARTS.values() for name in part.scenarios)


def test_predictors_are_recognised_by_their_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = {"a": ("conv1", "dense2"), "b": ("features.0", "classifier"), "c": ("stem", "head")}
    monkeypatch.setattr(bandwidth.Pretrained, "load", lambda path: argparse.Namespace(layers=ends[str(path)]))
    predictors = bandwidth.Predictors(["a", "b"], lambda task: tmp_path / task, quick=True)
    assert predictors.file("activity") == Path("a").resolve()
    assert predictors.file("digits") == Path("b").resolve()
    with pytest.raises(ValueError, match="c is a predictor for the layers stem to head, which no task has"):
        bandwidth.Predictors(["c"], lambda task: tmp_path / task, quick=True)


class FakeDevices:
    """Trains nothing; fails once for the baseline."""

    runs: list[str] = []  # noqa: RUF012

    def __init__(self, setting: Any) -> None:
        self.setting = setting

    def __enter__(self) -> FakeDevices:
        return self

    def __exit__(self, *_: object) -> None:
        self.runs.append("closed")

    def train(self, options: list[str], setting: Any, paced: bool, deadline: float) -> dict[str, Any]:
        self.setting = setting
        method = options[options.index("--method") + 1]
        self.runs.append(method)
        if method == "ftpipehd" and self.runs.count(method) == 1:
            raise RuntimeError("the worker has gone")
        times = [float(batch) for batch in range(18)]
        return {"plans": [PLAN], "end": END, "times": times, "steady": [6, 18], "curve": [], "log": []}


def test_a_failure_is_recorded_and_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bandwidth, "Devices", FakeDevices)
    monkeypatch.setattr(FakeDevices, "runs", [])
    given = ["mnist", "--rates", "1", "--scenarios", "A", "--methods", "ftpipehd", "ours", "--json"]
    arguments = command_line(*given, str(tmp_path / "bandwidth.json"))
    for attempt in range(3):
        report = Report("bandwidth")
        report.resume(arguments.json)
        with bandwidth.Run(report, arguments, bandwidth.Predictors([], Path, False)) as run:
            run.cells(list(bandwidth.cells(arguments)))
        rows = {row["method"]: row for row in json.loads(Path(arguments.json).read_text())["rows"]["mnist"]}
        assert rows["ours"]["seconds"] == 1.0
        assert ("error" in rows["ftpipehd"]) == (attempt == 0)
    assert FakeDevices.runs == ["ftpipehd", "closed", "ours", "closed", "ftpipehd", "closed"]
    assert len(report.rows["runs"]) == 2


@pytest.mark.usefixtures("root")
def test_one_short_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "bandwidth.json"
    given = ["activity", "--quick", "--methods", "ours", "--rates", "4", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bandwidth.py", *given])
    bandwidth.main()
    document = json.loads(path.read_text())
    (cell,) = document["rows"]["activity"]
    assert "error" not in cell, cell["error"]
    assert cell["seconds"] > 0
    assert cell["batches"] >= 3 * cell["in_flight"]
    (run,) = document["rows"]["runs"]
    assert set(run["before"]) == {"measuring devices", "probing links and planning", "moving weights"}
    for reached, _ in run["end"]["links"].values():
        assert 2e6 < reached < 4.5e6  # probed while the links were limited
    tables.bandwidth(document)
