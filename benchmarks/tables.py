"""Prints the tables of benchmarks/README.md from the figures in benchmarks/results.

python benchmarks/tables.py [NAME ...]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Document = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def codecs(document: Document) -> str:
    """Times over a memory copy, one row per codec."""
    tensors = [row["tensor"] for row in document["rows"]["copy"] if row["tensor"][0] == 128]
    rows = []
    for table_name in ("ours", "peers"):
        found = document["rows"].get(table_name, [])
        for codec in dict.fromkeys(row["codec"] for row in found):
            cells = {str(row["tensor"]): row for row in found if row["codec"] == codec}
            of_large = [cells.get(str(tensor), {}) for tensor in tensors]
            small = cells.get("[16, 32]", {})
            rows.append(
                [
                    codec,
                    " / ".join(_number(cell.get("encode"), 1) for cell in of_large),
                    " / ".join(_number(cell.get("decode"), 1) for cell in of_large),
                    _number(small.get("encode_us"), 0),
                    " / ".join(_number(cell.get("bytes"), 3) for cell in of_large),
                ]
            )
    shapes = " / ".join(str(tensor) for tensor in tensors)
    return f"Tensors {shapes}; times are multiples of a copy of the same tensor.\n\n" + table(
        ["codec", "encode", "decode", "encode [16, 32], µs", "bytes, share of raw"], rows
    )


def convergence(document: Document) -> str:
    """Accuracy and bytes, one row per task and method."""
    rows = []
    for row in document["rows"].get("summary", []):
        rows.append(
            [
                row["task"],
                row["method"],
                str(row["seeds"]),
                f"{row['accuracy_percent']:.2f} ± {row['deviation']:.2f}",
                f"{row['points_against_none']:+.2f}",
                f"{row['bytes_per_batch'] / 1024:.0f}",
                f"{100 * row['share_of_raw']:.1f} %",
            ]
        )
    head = ["data", "forward / backward bits", "seeds", "test accuracy, %", "points", "KiB per batch", "of raw"]
    return table(head, rows)


def learning(document: Document) -> str:
    """Mean accuracy, one row per method, one column per problem."""
    problems = list(document["rows"])
    methods = list(dict.fromkeys(row["method"] for rows in document["rows"].values() for row in rows))
    body = []
    for method in methods:
        cells = [method]
        for problem in problems:
            found = [100 * r["accuracy"] for r in document["rows"][problem] if r["method"] == method]
            cells.append(
                f"{statistics.mean(found):.1f} ({', '.join(f'{value:.1f}' for value in found)})" if found else ""
            )
        body.append(cells)
    return table(["test accuracy, % (seeds)", *problems], body)


def stability(document: Document) -> str:
    """Largest stable learning rates, one row per staleness."""
    rows = document["rows"]["limits"]
    body = [
        [
            str(row["staleness"]),
            *(f"{row[way]:.3f} (1/{rows[0][way] / row[way]:.0f})" for way in ("stashing", "weight_prediction")),
        ]
        for row in rows
    ]
    head = ["staleness, updates", "stashing alone", "with weight prediction"]
    return (
        f"Largest stable learning rate times curvature, SGD with momentum {rows[0]['momentum']:g} (as a part of that"
        " without staleness):\n\n" + table(head, body)
    )


def overlap(document: Document) -> str:
    """Both measurements, one row per repeat."""
    parts = []
    for name, rows in document["rows"].items():
        head = list(rows[0])
        parts.append(f"{name}:\n\n" + table(head, [[_number(row[key], 4) for key in head] for row in rows]))
    figures = ", ".join(f"{name} {value:.3f}" for name, value in document["figures"].items())
    return "\n\n".join([*parts, f"Medians: {figures}."])


def latency(document: Document) -> str:
    """Errors over all configurations, one row per method."""
    figures = document["figures"]
    rows = document["rows"]["all configurations"]
    head = list(rows[0])
    text = f"{figures['model']}, {figures['layers']} layers, batch {figures['batch']}, {figures['configurations']}"
    return f"{text} configurations; errors in percent.\n\n" + table(
        head, [[_number(row.get(key), 1) for key in head] for row in rows]
    )


def foresight(document: Document) -> str:
    """Predicted against measured periods, and what a changed device led to; the raw runs stay in the file."""
    parts = []
    for name, rows in document["rows"].items():
        if name in ("runs", "tried"):
            continue
        head = [key for key in rows[0] if key not in ("setting", "in_flight")]
        parts.append(f"{name}:\n\n" + table(head, [[_number(row.get(key), 3) for key in head] for row in rows]))
    figures = ", ".join(f"{name} {_number(value, 3)}" for name, value in document["figures"].items())
    return "\n\n".join([*parts, f"Figures: {figures}."])


def bandwidth(document: Document) -> str:
    """Per network and scenario, one row per rate and one column per method; the raw runs stay in the file."""
    parts = []
    for name in ("mnist", "activity", "target"):
        rows = document["rows"].get(name, [])
        for scenario in dict.fromkeys(row["scenario"] for row in rows):
            own = [row for row in rows if row["scenario"] == scenario]
            shares = " / ".join(str(share) for share in own[0]["shares"])
            title = f"{name}, scenario {scenario}: CPU shares {shares} %, batch {own[0]['batch']}"
            if name == "target":
                parts.append(
                    f"{title}; seconds to {own[0]['target']:.0%} (speed-up; batches):\n\n{_by_rate(own, _way)}"
                )
                continue
            parts.append(f"{title}; seconds per batch (speed-up):\n\n{_by_rate(own, _period)}")
            bounds = "over the planner's bound / with the stages' times as training reported them"
            parts.append(f"{bounds} (in flight; first layers):\n\n{_by_rate(own, _quality)}")
    figures = ", ".join(f"{name}: {_number(value, 2)}" for name, value in document["figures"].items())
    return "\n\n".join([*parts, f"Figures: {figures}."])


def _by_rate(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    body = []
    for rate in sorted({row["rate"] for row in rows}):
        own = {row["method"]: row for row in rows if row["rate"] == rate}
        body.append([f"{rate:g}", *("" if method not in own else cell(own[method]) for method in methods)])
    return table(["Mbit/s", *methods], body)


def _period(row: dict[str, Any]) -> str:
    return "failed" if "error" in row else f"{row['seconds']:.3f}{_speedup(row)}"


def _quality(row: dict[str, Any]) -> str:
    if "error" in row:
        return "failed"
    ratios = f"{row['over_bound']:.2f} / {row['over_measured_bound']:.2f}"
    return f"{ratios} ({row['in_flight']}; {', '.join(str(start) for start in row['starts'])})"


def _way(row: dict[str, Any]) -> str:
    if "error" in row:
        return "failed"
    if row["seconds"] is None:
        return f"not in {row['trained_seconds']:.0f} ({row['best_accuracy']:.1%} at best)"
    return f"{row['seconds']:.0f}{_speedup(row)}; {row['batches']}"


def _speedup(row: dict[str, Any]) -> str:
    return f" ({row['speedup']:.2f})" if "speedup" in row else ""


def accuracy(document: Document) -> str:
    """Final accuracy and points against a single device, one row per task and method."""
    rows = []
    for row in document["rows"].get("summary", []):
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
        gap = "" if row["points_against_single"] is None else f"{row['points_against_single']:+.2f}"
        error = "" if not row["standard_error"] else f" ± {row['standard_error']:.2f}"
        rows.append(
            [
                row["task"],
                row["method"],
                f"{row['seeds']}, {row['epochs']}",
                f"{row['accuracy_percent']:.2f}{spread}",
                gap + error,
                f"{row['bytes_per_batch'] / 1024:.0f}",
            ]
        )
    head = ["task", "method", "seeds, epochs", "test accuracy, %", "points against a single device", "KiB per batch"]
    return table(head, rows)


def alternatives(document: Document) -> str:
    """Samples per second, bytes per sample and times to an accuracy, one row per method, one column per rate."""
    speed, parts = document["rows"].get("speed", []), []
    rates = sorted({row["rate_mbit"] for row in speed if row["rate_mbit"] is not None})
    heads = [f"{rate:g} Mbit/s" for rate in rates]

    def pivot(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
        body = []
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = {row["rate_mbit"]: cell(row) for row in rows if row["method"] == method}
            body.append([method, *(mine.get(rate, mine.get(None, "")) for rate in rates)])
        return table(["", *heads], body)

    def fast(row: dict[str, Any]) -> str:
        if row.get("samples_per_s_at_most") is not None:
            return f"under {row['samples_per_s_at_most']:.2f}"
        if row.get("samples_per_s") is None:
            return row["note"] or "too few batches"
        size = "" if row.get("bytes_per_sample") is None else f" ({row['bytes_per_sample'] / 1024:.2f})"
        return f"{row['samples_per_s']:.1f}{size}"

    parts.append("Samples per second (KiB per sample on all links together):\n\n" + pivot(speed, fast))
    learnt = document["rows"].get("accuracy", [])
    if learnt:
        rows = [
            [
                row["method"],
                f"{row['learning_rate']:g}",
                _number(row.get("batches_to_target"), 0) or row["note"],
                ", ".join(f"{100 * share:.0f}" for _, share in row.get("curve", ())),
            ]
            for row in learnt
        ]
        columns = ["", "learning rate", "batches", "accuracy after each epoch, %"]
        parts.append(f"Batches to an accuracy of {learnt[0]['target']}:\n\n" + table(columns, rows))
    usual = learnt[0]["learning_rate"] if learnt else None
    times = [
        row
        if row["learning_rate"] == usual
        else {**row, "method": f"{row['method']}, learning rate {row['learning_rate']:g}"}
        for row in document["rows"].get("time", [])
    ]
    if times:
        parts.append(
            "Seconds to that accuracy, batches times seconds:\n\n" + pivot(times, lambda row: f"{row['seconds']:.0f}")
        )
    figures = ", ".join(f"{name} {_number(value, 2)}" for name, value in document["figures"].items())
    return "\n\n".join([*parts, f"Figures: {figures}."])


def scale(document: Document) -> str:
    """Medians and quartiles over the draws, one row per chain, number of devices and of micro-batches."""
    columns = {
        "stages": ("stages used", 0),
        "period_s": ("batch period, s", 2),
        "speedup": ("times the best device alone", 2),
        "utilisation": ("utilisation", 2),
        "staleness_first": ("staleness, first stage", 0),
        "staleness_mean": ("staleness, mean", 1),
        "over_bound": ("period over bound", 3),
    }
    body = []
    for row in document["rows"]["scale"]:
        cells = []
        for name, (_, digits) in columns.items():
            low, middle, high = (f"{value:.{digits}f}" for value in row[name])
            cells.append(f"{middle} ({low}-{high})")
        body.append([row["chain"], str(row["devices"]), str(row["micro_batches"]), *cells])
    head = ["chain", "devices", "micro-batches", *(text for text, _ in columns.values())]
    draws = document["rows"]["scale"][0]["draws"]
    figures = ", ".join(f"{name} {_number(value, 3)}" for name, value in document["figures"].items())
    return f"Median (quartiles) of {draws} draws.\n\n{table(head, body)}\n\nFigures: {figures}."


def _number(value: Any, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


TABLES: dict[str, Callable[[Document], str]] = {
    "overlap": overlap,
    "learning": learning,
    "stability": stability,
    "codecs": codecs,
    "convergence": convergence,
    "latency": latency,
    "foresight": foresight,
    "bandwidth": bandwidth,
    "alternatives": alternatives,
    "scale": scale,
    "accuracy": accuracy,
}


def main() -> None:
    """Print the tables named on the command line, or all."""
    for name in sys.argv[1:] or TABLES:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        machine = document["machine"]
        print(f"### {name}\n\n{document['date']}, {machine['processor']}, {machine['cores']} cores\n")
        print(TABLES[name](document) + "\n")


if __name__ == "__main__":
    main()
