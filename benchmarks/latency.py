"""How well are times of sub-models predicted on a device configuration that was never seen?

    python benchmarks/latency.py [--data FILE] [--quick] [--json FILE]

Leave one configuration out: the predictor is trained on all others, gets h of the one left out, and predicts all its
sub-models; then again after 8 and after 32 samples, as training would report them: stages of random partitions. Errors
are on the sub-models that are in neither. ``capacity`` gets the whole model's time on the configuration, and every
other configuration's turn as the central node; ``measured`` gets every layer alone and the whole model. The noise
floor is the error of a second measurement of the same sub-model.

Without --data, MobileNetV2 (20 layers, 210 sub-models, batch 128 of 32x32) is measured first under all conditions that
this machine can be put in, which takes an hour or two and should have the machine for itself. --quick measures
a small network under a few conditions, so shortly that the figures mean nothing.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from report import Report
from torch import nn
from torchvision.models import mobilenet_v2

from lightning_accept.graph import trace
from lightning_accept.latency.base import LatencyModel
from lightning_accept.latency.capacity import Capacity
from lightning_accept.latency.collect import collect
from lightning_accept.latency.conditions import Condition, choose_conditions
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.measured import Measured
from lightning_accept.latency.predictor import Predictor
from lightning_accept.latency.submodels import Measurement, Span, all_spans, representatives
from lightning_accept.latency.training import pretrain

SAMPLES = (8, 32)
QUICK = ("plain", "channels last", "slow calls", "scalar kernels")
TARGET_MEDIAN, TARGET_HIGH, TARGET_FACTOR = 5.0, 15.0, 3.0
"""Median and 90th percentile of the error in percent after 8 samples, and the factor to ``capacity``."""


class Results:
    """Absolute percentage errors of each method, of all sub-models and of those of one layer."""

    def __init__(self) -> None:
        self._errors: dict[str, list[tuple[Span, float]]] = {}

    def add(self, method: str, errors: Iterable[tuple[Span, float]]) -> None:
        """Take in errors in percent."""
        self._errors.setdefault(method, []).extend(errors)

    def extend(self, other: Results) -> None:
        """Take in all of another's."""
        for method, own in other._errors.items():
            self.add(method, own)

    def summary(self, method: str) -> dict[str, float]:
        """Median and 90th percentile."""
        own = self._errors[method]
        every = np.array([error for _, error in own])
        layers = np.array([error for (first, stop), error in own if stop == first + 1])
        result = {"median": float(np.median(every)), "p90": float(np.quantile(every, 0.9))}
        if len(layers):
            result |= {"layer_median": float(np.median(layers)), "layer_p90": float(np.quantile(layers, 0.9))}
        return result

    def methods(self) -> list[str]:
        """Their names."""
        return list(self._errors)


def stages(layers: int, count: int, seed: int) -> list[Span]:
    """Sub-models that a device could hold: different random stages of random partitions into 2 to 5 stages.

    Fewer than ``count`` if that would be more than a third of all.
    """
    random = np.random.default_rng(seed)
    found: dict[Span, None] = {}
    while len(found) < min(count, layers * (layers + 1) // 6):
        parts = int(random.integers(2, min(5, layers) + 1))
        cuts = [0, *sorted(random.choice(np.arange(1, layers), parts - 1, replace=False).tolist()), layers]
        stage = int(random.integers(parts))
        found[cuts[stage], cuts[stage + 1]] = None
    return list(found)


def errors(predict: Callable[[Span], float], truth: Iterable[Measurement]) -> list[tuple[Span, float]]:
    """Absolute error in percent of each measurement that was possible."""
    return [(one.span, 100 * abs(predict(one.span) / one.seconds - 1)) for one in truth if one.possible]


def seconds(model: LatencyModel, device: str) -> Callable[[Span], float]:
    """The model's times of a device as a function of the sub-model."""
    times = model.times(device)
    return lambda span: times.forward(*span) + times.backward(*span)


def learn(model: LatencyModel, device: str, configuration: Configuration, central: bool = False) -> None:
    """Give the model what it wants to have measured on a configuration."""
    known = configuration.by_span()
    model.learn(device, [known[span] for span in model.spans(device, central)])


def leave_out(dataset: Dataset, configuration: Configuration, seed: int) -> Results:
    """All methods on one configuration."""
    results = Results()
    layers, flops = len(dataset.model.layers), dataset.model.flops
    known, reports = configuration.by_span(), {one.span: one for one in configuration.repeats}
    samples = [reports.get(span, known[span]) for span in stages(layers, max(SAMPLES), seed)]
    left_out = {*representatives(flops), *(sample.span for sample in samples)}
    truth = [known[span] for span in all_spans(layers) if span not in left_out]

    model = Predictor(pretrain(dataset.without(configuration.name), seed=seed))
    model.prepare(layers, flops, dataset.model.layers)
    learn(model, "device", configuration)
    results.add("predictor", errors(seconds(model, "device"), truth))
    for start, stop in zip((0, *SAMPLES), SAMPLES, strict=False):
        for sample in samples[start:stop]:
            model.observe("device", sample)
        results.add(f"predictor, {stop} samples", errors(seconds(model, "device"), truth))
    for other in dataset.configurations:
        if other.name != configuration.name:
            capacity = Capacity()
            capacity.prepare(layers, flops)
            learn(capacity, "central node", other, central=True)
            learn(capacity, "device", configuration)
            results.add("capacity", errors(seconds(capacity, "device"), truth))
    measured = Measured()
    measured.prepare(layers, flops)
    learn(measured, "device", configuration)
    results.add("measured", errors(seconds(measured, "device"), truth))
    if configuration.repeats:
        results.add("measured again", errors(lambda span: known[span].seconds, configuration.repeats))
    return results


def measure(path: str, quick: bool, per_condition: float) -> Dataset:
    """Collect the data set."""
    if quick:
        blocks = [nn.Sequential(nn.Conv2d(into, 8, 3, padding=1), nn.ReLU()) for into in (3, *[8] * 7)]
        module: nn.Module = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 16 * 16, 10))
        return collect(trace(module, (torch.randn(8, 3, 16, 16),), {}), "small", usable(QUICK), path, seconds=1.0)
    traced = trace(mobilenet_v2(num_classes=10), (torch.randn(128, 3, 32, 32),), {})

    def progress(condition: Condition, share: float) -> None:
        if share >= 1.0:
            print(f"measured: {condition.name}", flush=True)

    return collect(traced, "MobileNetV2", usable(None), path, seconds=per_condition, on_progress=progress)


def usable(names: Iterable[str] | None) -> list[Condition]:
    """Conditions that this machine can be put in."""
    chosen = []
    for condition in choose_conditions(names):
        reason = condition.unavailable()
        if reason is None:
            chosen.append(condition)
        else:
            print(f"left out: {condition.name}: {reason}")
    return chosen


def main() -> None:
    """Measure, predict, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="a data set; measured first, or to the end, if it is not there")
    parser.add_argument("--seconds", type=float, default=120.0, help="to measure each condition for")
    parser.add_argument("--quick", action="store_true", help="a few seconds; the figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report("latency", options.quick)
    with tempfile.TemporaryDirectory() as folder:
        if options.data and Path(options.data).exists():
            dataset = Dataset.load(options.data)
        else:
            path = options.data or str(Path(folder) / "latency.json")
            dataset = measure(path, options.quick, options.seconds)
    report.figure("model", dataset.model.name)
    report.figure("layers", len(dataset.model.layers))
    report.figure("sub-models", len(all_spans(len(dataset.model.layers))))
    report.figure("batch", dataset.model.batch)
    report.figure("configurations", len(dataset.configurations))
    together = Results()
    for seed, configuration in enumerate(dataset.configurations):
        own = leave_out(dataset, configuration, seed)
        for method in own.methods():
            report.row("configuration", name=configuration.name, method=method, **own.summary(method))
        together.extend(own)
    for method in together.methods():
        report.row("all configurations", method=method, **together.summary(method))
    adapted, capacity = together.summary(f"predictor, {SAMPLES[0]} samples"), together.summary("capacity")
    report.figure("median error over capacity's", adapted["median"] / capacity["median"])
    report.figure(f"median <= {TARGET_MEDIAN:g} %", adapted["median"] <= TARGET_MEDIAN)
    report.figure(f"90th percentile <= {TARGET_HIGH:g} %", adapted["p90"] <= TARGET_HIGH)
    report.figure("three times better than capacity", TARGET_FACTOR * adapted["median"] <= capacity["median"])
    report.finish(options.json)


if __name__ == "__main__":
    main()
