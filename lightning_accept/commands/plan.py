"""``lightning-accept plan``: the partition for given devices and links, and what to expect of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_accept.codecs import Codec, CodecError, Raw, make_codec
from lightning_accept.codecs.defaults import default_backward, default_forward
from lightning_accept.commands.link_text import parse_link
from lightning_accept.commands.text_table import aligned, size
from lightning_accept.latency.base import LatencyModel
from lightning_accept.latency.choose import latency_factory
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.model_facts import ModelFacts
from lightning_accept.latency.submodels import all_spans
from lightning_accept.partition.choose import Candidate
from lightning_accept.partition.forecast import Forecast, make_forecast
from lightning_accept.partition.link import Link
from lightning_accept.partition.plan import PlanError
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.partition.times import SubModelTimes, TableTimes
from lightning_accept.pipeline.crossing import message_bytes, small_output


@dataclass(frozen=True)
class PlanOptions:
    """What ``lightning-accept plan`` is given.

    Attributes:
        data: Data sets of ``lightning-accept profile``: one for whole batches, and for ``micro_batches`` to choose
            from, more of the same model at smaller batch sizes.
        devices: Names of the configurations in the order of the chain, the central node's first.
        links: One for all, or one per hop: central node to first worker, ..., last worker to central node.
        latency: ``measured``, ``capacity``, a predictor file, or ``table`` for nothing but what was measured.
        forward_codec: Codec for activations.
        backward_codec: Codec for gradients.
        in_flight: Batches in flight; None to choose.
        leave_out: Whether workers may be left out.
        memory: Bytes of each device, or one for all; empty for no limit.
        state_copies: Optimizer state per parameter, as a multiple of the parameters.
        json: Whether to print JSON.
    """

    data: Sequence[str]
    devices: Sequence[str]
    links: Sequence[str]
    latency: str
    forward_codec: str | Codec
    backward_codec: str | Codec
    in_flight: int | None
    leave_out: bool
    memory: Sequence[int]
    state_copies: float
    json: bool


def run_plan(options: PlanOptions) -> int:
    """Print the plan; returns the process's exit code (0, or 2 if there is none)."""
    try:
        model, forecast = make_plan(options)
    except (OSError, ValueError, PlanError, CodecError) as error:
        print(f"lightning-accept plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(model, forecast), indent=2) if options.json else as_table(model, forecast))
    return 0


def make_plan(options: PlanOptions) -> tuple[ModelFacts, Forecast]:
    """The model and the plan.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the options do not fit each other.
        PlanError: If there is no plan.
    """
    parts = [Dataset.load(path) for path in options.data]
    parts.sort(key=lambda part: -part.model.batch)
    whole = parts[0].model
    problems = {}
    for part in parts:
        if part.model.layers != whole.layers:
            raise ValueError(f"the data sets are of different models: {whole.name} and {part.model.name}")
        if whole.batch % part.model.batch:
            raise ValueError(f"batch size {part.model.batch} is no whole part of {whole.batch}")
        problems[whole.batch // part.model.batch] = _problem(options, part, whole)
    return whole, make_forecast(problems, in_flight=options.in_flight)


def as_json(model: ModelFacts, forecast: Forecast) -> dict[str, Any]:
    """The plan as JSON-able values; what is infinite or unknown is null."""
    plan = asdict(forecast.plan)
    for stage in plan["stages"]:
        stage["layers"] = list(model.layers[stage["first"] : stage["stop"]])
    schedule = asdict(forecast.schedule)
    schedule["staleness"] = list(forecast.schedule.staleness)
    answer = {
        "model": model.name,
        "batch": model.batch,
        "period_seconds": forecast.period,
        "speedup_over_one_device": forecast.speedup,
        "plan": plan,
        "schedule": schedule,
        "trade": [_trade(candidate) for candidate in forecast.trade],
    }
    return {name: _finite(value) for name, value in answer.items()}


def as_table(model: ModelFacts, forecast: Forecast) -> str:
    """The plan for a person."""
    plan = forecast.plan
    lines = [f"{model.name}, batch {model.batch}", ""]
    rows: list[tuple[str, ...]] = [("stage", "device", "layers", "seconds", "memory")]
    for number, stage in enumerate(plan.stages):
        names = model.layers[stage.first : stage.stop]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append((str(number), stage.name, f"{span} ({len(names)})", f"{stage.seconds:.4g}", size(stage.memory)))
    lines += [*aligned(rows), ""]
    rows = [("link", "there", "back", "seconds")]
    for link in plan.links:
        there, back = size(link.forward_bytes), size(link.backward_bytes)
        rows.append((f"{link.source} -> {link.target}", there, back, f"{link.seconds:.4g}"))
    lines += [*aligned(rows), ""]
    schedule = forecast.schedule
    speed = "no single device can hold the model"
    if forecast.speedup is not None:
        speed = f"{forecast.speedup:.2f} times as fast as {plan.single} alone"
    lines += [
        f"{forecast.period:.4g} s per batch, held up most by {plan.bottleneck}; {speed}",
        f"in flight {schedule.in_flight}, micro-batches {schedule.micro_batches}, windows"
        f" {', '.join(map(str, schedule.windows))}, staleness {', '.join(map(str, schedule.staleness))}",
    ]
    lines += [f"left out: {out.name}, {out.reason}" for out in plan.left_out]
    if len(forecast.trade) > 1:
        rows = [("in flight", "micro-batches", "staleness", "seconds per batch")]
        for candidate in forecast.trade:
            other = candidate.schedule
            mark = " *" if other == schedule else ""
            stale = ", ".join(map(str, other.staleness))
            rows.append((str(other.in_flight), str(other.micro_batches), stale, f"{candidate.period:.4g}{mark}"))
        lines += ["", "period against staleness (* chosen):", *aligned(rows)]
    return "\n".join(lines)


def _problem(options: PlanOptions, part: Dataset, whole: ModelFacts) -> Problem:
    """The planner's problem for micro-batches of the size that ``part`` was measured with."""
    model, count = part.model, len(options.devices)
    known = {one.name: one for one in part.configurations}
    for name in options.devices:
        if name not in known:
            raise ValueError(f"there is no device {name!r} in the data; there are {', '.join(known)}")
    latency = _latency(options.latency, model)
    times = [_times(latency, model, known[name], number, number == 0) for number, name in enumerate(options.devices)]
    memory = _per_device("--memory", options.memory or [0], count)
    hops = [parse_link(text) for text in _per_device("--links", options.links or ["unlimited"], count)]
    schedule = default_schedule(count - 1, options.in_flight, whole.batch // model.batch)
    devices = [
        Device(
            name if options.devices.count(name) == 1 else f"{name} #{number}",
            times[number],
            memory=memory[number] or math.inf,
            weight_versions=schedule.staleness[number] + 1,
            in_flight=schedule.in_flight,
            # What a device sends and receives in all is as fast as the fastest of its links.
            uplink=max(hops[number].forward_bandwidth, hops[number - 1].backward_bandwidth),
            downlink=max(hops[number].backward_bandwidth, hops[number - 1].forward_bandwidth),
        )
        for number, name in enumerate(options.devices)
    ]
    forward = default_forward() if options.forward_codec == "auto" else make_codec(options.forward_codec)
    backward = default_backward() if options.backward_codec == "auto" else make_codec(options.backward_codec)
    down, up = _crossing(model, forward, backward)
    return Problem(
        devices,
        down,
        up,
        _links(hops),
        weight_bytes=whole.weight_bytes,
        activation_bytes=whole.activation_bytes,
        state_copies=1 + options.state_copies,
        may_leave_out=options.leave_out,
        share=True,
    )


def _latency(name: str, model: ModelFacts) -> LatencyModel | None:
    if name == "table":
        return None
    make = latency_factory(name)
    if make is None:
        raise ValueError("--latency flops tells no times; choose table, measured, capacity or a predictor file")
    latency = make()
    latency.prepare(len(model.layers), model.flops, model.layers)
    return latency


def _times(
    latency: LatencyModel | None, model: ModelFacts, device: Configuration, number: int, central: bool
) -> SubModelTimes:
    found = device.by_span()
    key = f"{number}: {device.name}"
    wanted = all_spans(len(model.layers)) if latency is None else latency.spans(key, central)
    missing = [span for span in wanted if span not in found]
    if missing:
        raise ValueError(
            f"layers {missing[0][0]} to {missing[0][1] - 1} were not measured on {device.name!r}, nor"
            f" {len(missing) - 1} other sub-models; choose another --latency, or measure all with:"
            " lightning-accept profile"
        )
    if latency is None:
        return TableTimes.from_function(
            len(model.layers), lambda first, stop: (found[first, stop].forward, found[first, stop].backward)
        )
    latency.learn(key, [found[span] for span in wanted])
    return latency.times(key)


def _crossing(model: ModelFacts, forward: Codec, backward: Codec) -> tuple[list[int], list[int]]:
    """Bytes that cross each cut per job, both ways."""
    raw = [sum(math.prod(value.shape) * value.itemsize for value in values) for values in model.cuts]
    codecs = forward, backward
    return message_bytes(model.cuts, codecs, (Raw(), Raw()) if small_output(raw[1:]) else codecs)


def _links(hops: Sequence[Link]) -> Callable[[int, int], Link]:
    """The planner's links, from those of the chain's hops; past devices that are left out, the slowest on the way."""

    def link(source: int, target: int) -> Link:
        passed = hops[source:target] if target else hops[source:]
        return min(passed or hops[:1], key=lambda hop: (hop.forward_bandwidth, -hop.forward_latency))

    return link


def _per_device(option: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise ValueError(f"{option} takes 1 value or {count}, one for each of the devices, not {len(values)}")
    return list(values)


def _trade(candidate: Candidate) -> dict[str, Any]:
    return {
        "in_flight": candidate.schedule.in_flight,
        "micro_batches": candidate.schedule.micro_batches,
        "windows": list(candidate.schedule.windows),
        "staleness": list(candidate.schedule.staleness),
        "period_seconds": candidate.period,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
