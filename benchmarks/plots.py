"""Draws the plots of benchmarks/README.md from the figures in benchmarks/results. Needs the extra ``benchmarks``.

    python benchmarks/plots.py [NAME ...] [--format svg|png]

NAME's figures are read from results/NAME.json and drawn into results/NAME.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

RESULTS = Path(__file__).parent / "results"
Document = dict[str, Any]
MARKERS = "osD^vPX"
ACROSS = 3
"""Panels side by side, of *bandwidth*."""


def bandwidth(document: Document) -> Figure:
    """Seconds per batch against the links' rate, one panel per network and scenario; and the way to an accuracy."""
    panels: list[Callable[[Axes], None]] = []
    tables = [document["rows"].get(part, []) for part in ("mnist", "activity", "target", "runs")]
    methods = list(dict.fromkeys(row["method"] for table in tables for row in table))
    for part in ("mnist", "activity"):
        rows = [row for row in document["rows"].get(part, []) if "seconds" in row]
        for scenario in dict.fromkeys(row["scenario"] for row in rows):
            own = [row for row in rows if row["scenario"] == scenario]
            panels.append(lambda axes, own=own, part=part: _rates(axes, part, own, methods))  # type: ignore[misc]
    runs = [run for run in document["rows"].get("runs", []) if run["part"] == "target"]
    for rate in dict.fromkeys(run["rate"] for run in runs):
        own = [run for run in runs if run["rate"] == rate]
        panels.append(lambda axes, own=own: _curves(axes, own, methods))  # type: ignore[misc]
    lines = max(1, -(-len(panels) // ACROSS))
    figure, axes = pyplot.subplots(lines, ACROSS, figsize=(4.2 * ACROSS, 3.8 * lines), squeeze=False)
    for place, panel in zip_longest(axes.flat, panels):
        if panel is None:
            place.set_axis_off()
        else:
            panel(place)
            place.legend(fontsize="small")
    return figure


def _style(method: str, methods: list[str]) -> dict[str, Any]:
    """The same in all panels."""
    number = methods.index(method)
    return {"label": method, "color": f"C{number}", "marker": MARKERS[number % len(MARKERS)]}


def _rates(axes: Axes, part: str, rows: list[dict[str, Any]], methods: list[str]) -> None:
    for method in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["rate"])
        rates, style = [row["rate"] for row in own], _style(method, methods)
        axes.plot(rates, [row["seconds"] for row in own], **style)
        axes.plot(rates, [row["bound"] for row in own], ":", color=style["color"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = sorted({row["rate"] for row in rows})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    shares = ":".join(f"{share}" for share in rows[0]["shares"])
    axes.set_title(f"{part}, CPU {shares} %", fontsize="medium")
    axes.set_xlabel("links, Mbit/s")
    axes.set_ylabel("seconds per batch (dotted: planner's bound)")


def _curves(axes: Axes, runs: list[dict[str, Any]], methods: list[str]) -> None:
    for run in runs:
        seconds, reached = ([point[name] for point in run["curve"]] for name in ("seconds", "accuracy"))
        axes.plot(seconds, reached, markersize=3, **_style(run["method"], methods))
    axes.axhline(runs[0]["target"], color="grey", linewidth=0.8)
    axes.set_title(f"digits at {runs[0]['rate']:g} Mbit/s", fontsize="medium")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy")


def alternatives(document: Document) -> Figure:
    """Samples per second of every method, one panel per rate; a device alone is the same in all."""
    speed = document["rows"].get("speed", [])
    rates = sorted({row["rate_mbit"] for row in speed if row["rate_mbit"] is not None})
    methods = list(dict.fromkeys(row["method"] for row in speed))[::-1]
    colours = ["tab:orange" if method == "ours" else "tab:blue" for method in methods]
    panels = max(1, len(rates))
    figure, axes = pyplot.subplots(1, panels, figsize=(3.0 + 2.6 * panels, 4.2), sharey=True, squeeze=False)
    for rate, place in zip(rates, axes[0], strict=False):
        found = {row["method"]: row for row in speed if row["rate_mbit"] in (None, rate)}
        rows = [found.get(method, {}) for method in methods]
        bars = place.barh(methods, [row.get("samples_per_s") or 0.0 for row in rows], color=colours)
        place.bar_label(bars, [_fast(row) for row in rows], padding=2, fontsize="small")
        place.set_title(f"{rate:g} Mbit/s", fontsize="medium")
        place.set_xlabel("samples per second")
        place.margins(x=0.2)
    return figure


def _fast(row: dict[str, Any]) -> str:
    if row.get("samples_per_s") is not None:
        return f"{row['samples_per_s']:.3g}"
    most = row.get("samples_per_s_at_most")
    return "none" if most is None else f"under {most:.3g}"


def accuracy(document: Document) -> Figure:
    """Test accuracy of every run, one panel per task; the bar is the mean over the seeds."""
    runs = document["rows"].get("runs", [])
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    figure, axes = pyplot.subplots(1, max(1, len(tasks)), figsize=(4.2 * max(1, len(tasks)), 3.2), squeeze=False)
    for task, place in zip(tasks, axes[0], strict=False):
        for number, method in enumerate(dict.fromkeys(run["method"] for run in runs if run["task"] == task)):
            hits = [100 * run["accuracy"] for run in runs if (run["task"], run["method"]) == (task, method)]
            place.plot(hits, [method] * len(hits), MARKERS[number % len(MARKERS)], alpha=0.7)
            place.plot([sum(hits) / len(hits)], [method], "k|", markersize=16)
        place.set_title(task, fontsize="medium")
        place.set_xlabel("test accuracy, %")
        place.margins(y=0.3)
        place.invert_yaxis()
    return figure


def scale(document: Document) -> Figure:
    """Speed-up over the best device and utilisation against the number of devices: medians and quartiles."""
    rows = document["rows"]["scale"]
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.8))
    columns = {"speedup": "times as fast as the best device alone", "utilisation": "utilisation of the stages in use"}
    for (column, text), place in zip(columns.items(), axes, strict=True):
        kinds = dict.fromkeys((row["chain"], row["micro_batches"]) for row in rows)
        for number, (chain, micro_batches) in enumerate(kinds):
            own = [row for row in rows if (row["chain"], row["micro_batches"]) == (chain, micro_batches)]
            low, middle, high = ([row[column][quarter] for row in own] for quarter in range(3))
            spread = [
                [mid - least for mid, least in zip(middle, low, strict=True)],
                [most - mid for mid, most in zip(middle, high, strict=True)],
            ]
            devices = [row["devices"] for row in own]
            label = f"{chain}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
            place.errorbar(devices, middle, spread, fmt=f"{MARKERS[number]}-", capsize=2, markersize=4, label=label)
        devices = sorted({row["devices"] for row in rows})
        place.set_xscale("log")
        place.set_xticks(devices, [str(count) for count in devices], minor=False)
        place.minorticks_off()
        place.set_xlabel("devices")
        place.set_ylabel(text)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda times, _: f"{times:g}"))
    axes[1].set_ylim(0.0, 1.05)
    axes[1].legend(fontsize="small", loc="lower right")
    return figure


PLOTS: dict[str, Callable[[Document], Figure]] = {
    "bandwidth": bandwidth,
    "alternatives": alternatives,
    "accuracy": accuracy,
    "scale": scale,
}


def draw(source: Path, target: Path) -> None:
    """Draw the plot of a file of figures.

    Raises:
        ValueError: If there is no plot for that benchmark.
    """
    document = json.loads(source.read_text())
    name = document["benchmark"]
    if name not in PLOTS:
        raise ValueError(f"there is no plot of {name}; there are {', '.join(PLOTS)}")
    figure = PLOTS[name](document)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    """Draw the plots named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {' '.join(PLOTS)}; all by default")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    arguments = parser.parse_args()
    for name in arguments.names or PLOTS:
        source = RESULTS / f"{name}.json"
        if source.exists():
            draw(source, source.with_suffix(f".{arguments.format}"))


if __name__ == "__main__":
    main()
