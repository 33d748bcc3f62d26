from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scale
import tables
from report import Report

from lightning_accept.partition.choose import choose_schedule
from lightning_accept.partition.model import Hop, PipelineModel, StageModel

RESULTS = Path(scale.__file__).parent / "results"


def test_draws_are_repeatable_and_in_range() -> None:
    one, other = scale.Fleet.draw(40, 3), scale.Fleet.draw(40, 3)
    assert one == other != scale.Fleet.draw(40, 4)
    assert all(scale.CAPACITIES[0] <= value <= scale.CAPACITIES[1] for value in one.capacities)
    assert all(scale.RATES[0] <= value <= scale.RATES[1] for value in one.rates)


def test_quartiles() -> None:
    assert scale.quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == [2.0, 3.0, 4.0]
    assert scale.quartiles([7.0]) == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_short_search_finds_about_what_the_long_one_does(micro_batches: int) -> None:
    stages = tuple(StageModel(seconds, 2 * seconds) for seconds in (0.7, 1.0, 0.9))
    model = PipelineModel(stages, (Hop(0.5, 0.5, 0.01, 0.01),) * 3, 0.02)
    schedule, found = scale.search(model, micro_batches)
    best = choose_schedule(model, micro_batches, max_in_flight=12)
    assert found.period <= best.period * (1 + scale.TOLERANCE)
    assert schedule.in_flight <= 2 * best.schedule.in_flight


def test_a_device_alone_needs_no_schedule() -> None:
    schedule, found = scale.search(PipelineModel((StageModel(1.0, 2.0),), ()), 1)
    assert (schedule.in_flight, found.period, found.staleness) == (1, 3.0, (0,))


def test_twice_the_equal_devices_are_twice_as_fast() -> None:
    work = scale.deep_chain(layers=32)
    rows = [scale.forecast(work, scale.Fleet([4e9] * count, [1e9] * count), 1) for count in (2, 4)]
    assert [row["stages"] for row in rows] == [2, 4]
    assert [row["speedup"] for row in rows] == pytest.approx([2.0, 4.0], rel=0.04)
    assert all(row["staleness_first"] == row["in_flight"] - 1 for row in rows)


def plan(**changes: Any) -> dict[str, Any]:
    def link(down: float, up: float) -> dict[str, float]:
        return {"forward_bytes": down, "backward_bytes": up}

    ways = ("0 -> 1", "1 -> 0", "1 -> 2", "2 -> 1", "2 -> 0", "0 -> 2")
    return {
        "period": 3.0,
        "in_flight": 6,
        "windows": [4, 2],
        "stages": [{"device": device, "seconds": seconds} for device, seconds in enumerate((2.0, 3.0, 1.0))],
        "links": [link(1e5, 1e5), link(1e5, 1e5), link(1e3, 1e3)],
        "speeds": {way: [8e6, 0.0] for way in ways},
        **changes,
    }


END = {"stages": {str(stage): {"forward": 1.0, "backward": 2.0} for stage in range(3)}}


def test_a_recorded_plan_is_simulated_again() -> None:
    model = scale.recorded_model(plan(), END)
    assert [stage.forward for stage in model.stages] == pytest.approx([2 / 3, 1.0, 1 / 3])
    assert model.hops[0].forward == pytest.approx(0.1)
    assert model.stages[1].uplink == 8e6
    assert scale.recorded_period(plan(), END) == pytest.approx(3.0)
    # One batch at a time: all stages, and what the links take.
    alone = scale.recorded_period(plan(in_flight=1, windows=[1, 1], backward_lag=0), END)
    assert alone == pytest.approx(6.0 + 0.4 + 0.002)


def test_the_simulator_is_held_against_measured_periods() -> None:
    report = Report("scale")
    scale.validate(report, RESULTS)
    assert report.figures["informed_median_error"] < 0.1


def test_cells_of_bandwidth_are_found_with_their_runs(tmp_path: Path) -> None:
    key = {"part": "mnist", "scenario": "A", "rate": 1, "method": "ours", "batch": 128, "depth": "auto"}
    key["predictor"] = None
    end = {**END, "period": 3.1}
    rows = {
        "mnist": [{**key, "seconds": 3.3, "planned": 3.0}, {**key, "scenario": "B", "error": "it failed"}],
        "runs": [{**key, "plans": [plan()], "end": end}, {**key, "scenario": "B", "plans": [plan()], "end": end}],
    }
    (tmp_path / "bandwidth.json").write_text(json.dumps({"rows": rows}))
    name, found = scale.recorded_runs(tmp_path)
    assert name == "bandwidth.json"
    assert [(run["run"], run["measured_s"]) for run in found] == [("mnist A 1 Mbit/s ours", 3.3)]


def test_draws_become_a_table(tmp_path: Path) -> None:
    report = Report("scale")
    scale.measure(report, [scale.deep_chain(layers=12)], [2], 3, str(tmp_path / "scale.json"))
    document = json.loads((tmp_path / "scale.json").read_text())
    assert len(document["rows"]["draws"]) == 6
    assert [row["micro_batches"] for row in document["rows"]["scale"]] == [1, 8]
    assert tables.scale(document).count("| 12 equal layers | 2 |") == 2
