from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import plots


def rows(part: str) -> list[dict[str, Any]]:
    made = [
        {"part": part, "scenario": "A", "shares": [75, 50, 25], "rate": rate, "method": method, "seconds": 2.0 / rate}
        for rate in (0.4, 100.0)
        for method in ("ftpipehd", "ours")
    ]
    failed = {"part": part, "scenario": "A", "shares": [75, 50, 25], "rate": 1.0, "method": "ours", "error": "lost"}
    return [*({**row, "bound": row["seconds"] / 1.1} for row in made), failed]


def test_the_plot_of_a_file(tmp_path: Path) -> None:
    curve = [{"seconds": 10.0 * n, "batches": 31 * n, "accuracy": 0.3 * n} for n in (1, 2, 3)]
    runs = [{"part": "target", "rate": 0.4, "method": method, "target": 0.9, "curve": curve} for method in ("a", "b")]
    document = {"benchmark": "bandwidth", "rows": {"mnist": rows("mnist"), "activity": rows("activity"), "runs": runs}}
    source = tmp_path / "bandwidth.json"
    source.write_text(json.dumps(document))
    plots.draw(source, tmp_path / "bandwidth.svg")
    text = (tmp_path / "bandwidth.svg").read_text()
    assert text.startswith("<?xml")
    plots.draw(source, tmp_path / "bandwidth.png")
    assert (tmp_path / "bandwidth.png").read_bytes()[1:4] == b"PNG"


def alternatives() -> dict[str, Any]:
    made = [
        {"method": method, "rate_mbit": rate, "samples_per_s": speed}
        for rate, speed in ((1.0, 10.0), (100.0, 200.0))
        for method in ("DDP", "ours")
    ]
    alone = {"method": "central alone", "rate_mbit": None, "samples_per_s": 100.0}
    return {
        "speed": [
            alone,
            *made,
            {"method": "DDP", "rate_mbit": 10.0, "samples_per_s": None, "samples_per_s_at_most": 1.28},
        ]
    }


def accuracy() -> dict[str, Any]:
    return {
        "runs": [
            {"task": task, "method": method, "seed": seed, "accuracy": 0.9 + seed / 100}
            for task in ("activity", "mnist")
            for method in ("single device", "ours, 4 / 4 bits")
            for seed in range(3)
        ]
    }


def scale() -> dict[str, Any]:
    return {
        "scale": [
            {
                "chain": "200 equal layers",
                "devices": devices,
                "micro_batches": micro_batches,
                "speedup": [0.8 * devices, 0.9 * devices, devices],
                "utilisation": [0.8, 0.9, 1.0],
            }
            for micro_batches in (1, 8)
            for devices in (2, 4)
        ]
    }


@pytest.mark.parametrize(
    ("name", "made", "seen"),
    [
        ("alternatives", alternatives, ["central alone", "1 Mbit/s", "100 Mbit/s", "samples per second", "under 1.28"]),
        ("accuracy", accuracy, ["activity", "mnist", "single device", "ours, 4 / 4 bits"]),
        ("scale", scale, ["200 equal layers, 8 micro-batches", "devices", "utilisation of the stages in use"]),
    ],
)
def test_the_other_plots(name: str, made: Any, seen: list[str], tmp_path: Path) -> None:
    with plots.pyplot.rc_context({"svg.fonttype": "none"}):  # text as text
        source = tmp_path / f"{name}.json"
        source.write_text(json.dumps({"benchmark": name, "rows": made()}))
        plots.draw(source, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert [words for words in seen if words not in text] == []


def test_a_plot_that_there_is_not(tmp_path: Path) -> None:
    source = tmp_path / "overlap.json"
    source.write_text(json.dumps({"benchmark": "overlap", "rows": {}}))
    with pytest.raises(ValueError, match="there is no plot of overlap; there are bandwidth"):
        plots.draw(source, tmp_path / "overlap.svg")
