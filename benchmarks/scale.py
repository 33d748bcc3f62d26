"""How far does it scale? From 2 to 64 unequal devices, by the planner and the simulator alone.

    python benchmarks/scale.py [--quick] [--json FILE]

Drawn, log-uniform, from seeds that the rows name: every device's compute from 2 to 16 GFLOP/s and the rate of its link
from 2 to 100 Mbit/s. The central node and the order of the others are as drawn. A backward takes twice its forward. In
the ring of stages every device has two neighbours and divides its rate evenly between them, which is no better than
what TCP does; a message and its answer take 1 ms each way. Batches of 128 under the codecs of ``methods.py``'s *ours*.

Two chains: MobileNetV2's 20 layers for [3, 32, 32], and 200 equal layers, residual blocks of two 3x3 convolutions on
[32, 8, 8]. The planner may leave devices out. Whole batches, and eight micro-batches per batch.

With --json, figures are written after each number of devices, and an interrupted run goes on where it stopped.

*Validation*: periods that were measured on emulated devices, in results/bandwidth.json or else results/foresight.json,
against the simulator's for the recorded plans.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import METHODS
from report import Report
from tasks import mobilenet

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, trace
from lightning_accept.partition.choose import round_trips
from lightning_accept.partition.forecast import whole_batch
from lightning_accept.partition.link import Link, Speed
from lightning_accept.partition.model import Hop, PipelineModel, StageModel
from lightning_accept.partition.planner import plan_partition
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.schedule import Schedule, usual_lag
from lightning_accept.partition.simulator import Simulation, simulate
from lightning_accept.partition.times import AdditiveTimes
from lightning_accept.pipeline.crossing import MESSAGE_BYTES, crossing

BATCH = 128
COUNTS = (2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 8)
CAPACITIES = 2e9, 16e9
"""FLOP/s of a device, least and most."""
RATES = 2e6, 100e6
"""Bits per second of a device's link, least and most."""
LATENCY = 0.001
BACKWARD = 2.0
"""Seconds of a backward per second of its forward."""
TOLERANCE = 0.03
"""How much longer than the least possible period is accepted, for fewer batches in flight."""
SLACKS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
SPARES = (0, 1, 2)


@dataclass(frozen=True)
class Work:
    """A model as a chain of layers.

    Attributes:
        name: What it is called.
        flops: Forward FLOPs of every layer per batch, ``[layers]``.
        down: Bytes of encoded activations per cut and batch, ``[layers + 1]``.
        up: Bytes of encoded gradients, likewise.
    """

    name: str
    flops: Sequence[float]
    down: Sequence[int]
    up: Sequence[int]


def mobilenet_chain() -> Work:
    """MobileNetV2."""
    codecs = METHODS["ours"].codec_arguments("digits")
    chain = Chain.from_trace(trace(mobilenet(), (torch.zeros(BATCH, 3, 32, 32),), {}))
    down, up = crossing(chain, codecs["forward_codec"], codecs["backward_codec"], {}, output_codecs=(Raw(), Raw()))
    return Work("MobileNetV2", [layer.flops for layer in chain.layers], down, up)


def deep_chain(layers: int = 200, channels: int = 32, side: int = 8) -> Work:
    """Equal residual blocks of two 3x3 convolutions."""
    codecs = METHODS["ours"].codec_arguments("digits")
    flops = 2 * 2 * 9 * channels**2 * side**2 * BATCH
    shape = (BATCH, channels, side, side)
    down, up = (MESSAGE_BYTES + codec.wire_bytes(shape, 4) for codec in codecs.values())
    return Work(f"{layers} equal layers", [flops] * layers, [down] * (layers + 1), [up] * (layers + 1))


# ----- draws


@dataclass(frozen=True)
class Fleet:
    """Devices that were drawn.

    Attributes:
        capacities: FLOP/s of each, the central node's first.
        rates: Bits per second of each one's link.
    """

    capacities: Sequence[float]
    rates: Sequence[float]

    @classmethod
    def draw(cls, count: int, seed: int) -> Fleet:
        """Log-uniform."""
        generator = np.random.default_rng(seed)

        def drawn(least: float, most: float) -> list[float]:
            return [float(value) for value in np.exp(generator.uniform(math.log(least), math.log(most), count))]

        return cls(drawn(*CAPACITIES), drawn(*RATES))

    def alone(self, work: Work) -> float:
        """Seconds per batch of the fastest device."""
        return (1 + BACKWARD) * sum(work.flops) / max(self.capacities)

    def problem(self, work: Work, micro_batches: int) -> Problem:
        """The planner's problem for one micro-batch."""
        devices = []
        for number, capacity in enumerate(self.capacities):
            forward = [flops / micro_batches / capacity for flops in work.flops]
            times = AdditiveTimes(forward, [BACKWARD * seconds for seconds in forward])
            devices.append(Device(f"device {number}", times))
        down, up = ([-(-nbytes // micro_batches) for nbytes in values] for values in (work.down, work.up))
        return Problem(devices, down, up, self.link, may_leave_out=True)

    def link(self, source: int, target: int) -> Link:
        """Half of the slower one's rate: each has another neighbour."""
        speed = Speed(min(self.rates[source], self.rates[target]) / 2, LATENCY)
        return Link.between(speed, speed)


# ----- schedules


def slackened(trips: Sequence[int], slack: float, spare: int, micro_batches: int) -> Schedule:
    """A schedule with the windows that the round trips ask for, and more.

    Args:
        trips: As :func:`round_trips` gives them, a batch's jobs at least.
        slack: Jobs that a window is larger, per stage from its own to the last: what waits in front of unequal stages.
        spare: Batches in flight beyond what the windows need.
        micro_batches: Jobs per batch.
    """
    windows = tuple(trip + math.ceil(slack * (len(trips) - index)) for index, trip in enumerate(trips))
    in_flight = max(2, 1 - (1 - windows[0]) // micro_batches) + spare
    return Schedule(in_flight, windows, usual_lag(in_flight), micro_batches)


def search(model: PipelineModel, micro_batches: int) -> tuple[Schedule, Simulation]:
    """The least slack with which the period is within the tolerance of the least possible one.

    The package's own search tries every neighbour of a schedule, which takes hours for 64 devices. This one finds
    about the same periods, and depths that may be a little larger than need be.
    """
    if len(model.stages) == 1:
        alone = Schedule(1, (), 0, micro_batches)
        return alone, simulate(model, alone)
    trips = [max(micro_batches, trip) for trip in round_trips(model, micro_batches)]
    limit = model.least_period(micro_batches) * (1 + TOLERANCE)

    def enough(slack: float, spare: int) -> bool:
        schedule = slackened(trips, slack, spare, micro_batches)
        return simulate(model, schedule, 4 * schedule.in_flight + 16).period <= limit

    at = bisect_left(SLACKS, True, key=lambda slack: enough(slack, SPARES[-1]))
    slack = SLACKS[min(at, len(SLACKS) - 1)]
    spare = next((spare for spare in SPARES[:-1] if enough(slack, spare)), SPARES[-1])
    schedule = slackened(trips, slack, spare, micro_batches)
    return schedule, simulate(model, schedule)


def measure(report: Report, works: Sequence[Work], counts: Sequence[int], draws: int, path: str | None) -> None:
    """All draws that the report does not hold yet."""
    for work in works:
        for count in counts:
            known = {"chain": work.name, "devices": count, "draws": draws}
            if any(known.items() <= row.items() for row in report.rows.get("scale", ())):
                continue
            for seed in range(draws):
                fleet = Fleet.draw(count, 1000 * count + seed)
                for micro_batches in MICRO_BATCHES:
                    row = forecast(work, fleet, micro_batches)
                    row = {"chain": work.name, "devices": count, "seed": 1000 * count + seed, **row}
                    if seed:
                        del row["staleness_per_stage"]
                    report.rows.setdefault("draws", []).append(row)
            sum_up(report, work.name, count)
            report.finish(path)


def forecast(work: Work, fleet: Fleet, micro_batches: int) -> dict[str, Any]:
    """Plan and simulate one fleet."""
    problem = fleet.problem(work, micro_batches)
    plan = plan_partition(whole_batch(problem, micro_batches))
    model = PipelineModel.of(problem, plan.devices, plan.boundaries, micro_batches)
    schedule, found = search(model, micro_batches)
    return {
        "micro_batches": micro_batches,
        "stages": len(plan.stages),
        "in_flight": schedule.in_flight,
        "period_s": found.period,
        "over_bound": found.period / model.least_period(micro_batches),
        "speedup": fleet.alone(work) / found.period,
        "utilisation": statistics.fmean(found.stage_utilisation),
        "staleness_first": found.staleness[0],
        "staleness_mean": statistics.fmean(found.staleness),
        "held_up_by": plan.bottleneck.split(" ", 1)[0],
        "staleness_per_stage": list(found.staleness),
    }


COLUMNS = (
    "stages",
    "period_s",
    "over_bound",
    "speedup",
    "utilisation",
    "in_flight",
    "staleness_first",
    "staleness_mean",
)


def sum_up(report: Report, chain: str, devices: int) -> None:
    """Quartiles over the draws of one number of devices."""
    for micro_batches in MICRO_BATCHES:
        wanted = {"chain": chain, "devices": devices, "micro_batches": micro_batches}
        rows = [row for row in report.rows["draws"] if wanted.items() <= row.items()]
        figures = {name: quartiles([row[name] for row in rows]) for name in COLUMNS}
        links = sum(row["held_up_by"] == "link" for row in rows) / len(rows)
        report.row("scale", **wanted, draws=len(rows), **figures, held_up_by_links=links)


def quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return [float(values[0])] * 3
    return [float(value) for value in statistics.quantiles(values, n=4, method="inclusive")]


# ----- validation


def recorded_model(plan: dict[str, Any], end: dict[str, Any]) -> PipelineModel:
    """The pipeline that a central node has written down.

    Args:
        plan: What it planned: seconds of stages, bytes of links, their speeds.
        end: What it knew at the end; it tells how a stage's seconds divide into forward and backward.
    """
    count = plan.get("micro_batches", 1)
    speeds = {tuple(map(int, way.split(" -> "))): Speed(*speed) for way, speed in plan["speeds"].items()}
    devices = [stage["device"] for stage in plan["stages"]]
    stages = []
    for number, stage in enumerate(plan["stages"]):
        median = end["stages"][str(number)]
        forward = stage["seconds"] * median["forward"] / (median["forward"] + median["backward"])
        up, down = (
            max((speed.bandwidth for way, speed in speeds.items() if way[end_of] == devices[number]), default=math.inf)
            for end_of in (0, 1)
        )
        stages.append(StageModel(forward / count, (stage["seconds"] - forward) / count, up, down))
    hops = []
    for number, load in enumerate(plan["links"]):
        source, target = devices[number], devices[(number + 1) % len(devices)]
        there, back = (speeds.get(way, Speed()) for way in ((source, target), (target, source)))
        hops.append(Hop.over(Link.between(there, back), load["forward_bytes"] / count, load["backward_bytes"] / count))
    if len(hops) == 1:  # an only worker's link, which both hops share
        hops.append(replace(hops[0], forward=0.0, backward=0.0))
    return PipelineModel(tuple(stages), tuple(hops))


def recorded_period(plan: dict[str, Any], end: dict[str, Any]) -> float:
    """The simulator's period for a recorded plan.

    Where the backward lag was not written down, it is the one whose period comes closest to the recorded forecast.
    """
    model, depth = recorded_model(plan, end), plan["in_flight"]
    lags = [plan["backward_lag"]] if "backward_lag" in plan else range(depth)
    schedules = [Schedule(depth, tuple(plan["windows"]), lag, plan.get("micro_batches", 1)) for lag in lags]
    periods = [simulate(model, schedule).period for schedule in schedules]
    return min(periods, key=lambda period: abs(period - plan["period"]))


def recorded_runs(results: Path) -> tuple[str, list[dict[str, Any]]]:
    """Where measured periods come from, and each with ``run``, ``measured_s``, ``plan`` and ``end``."""
    path = results / "bandwidth.json"
    found = _of_bandwidth(json.loads(path.read_text())["rows"]) if path.exists() else []
    if not found:
        path = results / "foresight.json"
        found = _of_foresight(json.loads(path.read_text())["rows"])
    return path.name, found


def _of_bandwidth(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Cells into the steady state, with the run that each comes from."""
    found = []
    for run in rows.get("runs", ()):
        names = ("part", "scenario", "rate", "method", "batch", "depth", "predictor")
        key = {name: run[name] for name in names}
        cells = [row for row in rows.get(run["part"], ()) if key.items() <= row.items() and row.get("planned")]
        if cells and run.get("plans") and run.get("end"):
            name = f"{run['part']} {run['scenario']} {run['rate']:g} Mbit/s {run['method']}"
            found.append(_run(name, cells[-1]["seconds"], run))
    return found


def _of_foresight(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ten settings."""
    runs = {run["run"]: run for run in rows["runs"]}
    names = [(f"simulate {row['setting']}", row["measured_s"]) for row in rows["simulate"]]
    return [_run(name, seconds, runs[name]) for name, seconds in names]


def _run(name: str, measured: float, run: dict[str, Any]) -> dict[str, Any]:
    return {"run": name, "measured_s": measured, "plan": run["plans"][-1], "end": run["end"]}


def validate(report: Report, results: Path) -> None:
    """The simulator against what was measured, from what was planned and from what training has told until its end."""
    source, runs = recorded_runs(results)
    report.rows.pop("validation", None)
    errors: dict[str, list[float]] = {"planned": [], "informed": []}
    for run in runs:
        simulated, informed = recorded_period(run["plan"], run["end"]), run["end"]["period"]
        errors["planned"].append(simulated / run["measured_s"] - 1)
        errors["informed"].append(informed / run["measured_s"] - 1)
        report.row(
            "validation",
            run=run["run"],
            measured_s=run["measured_s"],
            simulated_s=simulated,
            informed_s=informed,
            **{f"{name}_error": values[-1] for name, values in errors.items()},
        )
    report.figure("validated_against", source)
    for name, values in errors.items():
        sizes = [abs(value) for value in values]
        report.figure(f"{name}_median_error", statistics.median(sizes))
        report.figure(f"{name}_largest_error", max(sizes))


def main() -> None:
    """Draw, simulate, validate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=7, help="fleets per number of devices")
    parser.add_argument("--devices", type=int, nargs="+", default=list(COUNTS), help="numbers of devices")
    parser.add_argument("--quick", action="store_true", help="three draws, up to 8 devices, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.draws, arguments.devices = 3, [2, 8]
    report = Report("scale", arguments.quick)
    report.resume(arguments.json)
    validate(report, Path(__file__).parent / "results")
    measure(report, [mobilenet_chain(), deep_chain()], arguments.devices, arguments.draws, arguments.json)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
