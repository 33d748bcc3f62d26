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


def _number(value: Any, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


TABLES: dict[str, Callable[[Document], str]] = {
    "overlap": overlap,
    "learning": learning,
    "codecs": codecs,
    "convergence": convergence,
    "latency": latency,
    "foresight": foresight,
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
