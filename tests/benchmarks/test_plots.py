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


def test_a_plot_that_there_is_not(tmp_path: Path) -> None:
    source = tmp_path / "overlap.json"
    source.write_text(json.dumps({"benchmark": "overlap", "rows": {}}))
    with pytest.raises(ValueError, match="there is no plot of overlap; there are bandwidth"):
        plots.draw(source, tmp_path / "overlap.svg")
