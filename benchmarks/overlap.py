"""How well the stages overlap, and what the strategy itself costs.

    python benchmarks/overlap.py [--quick] [--json FILE]

1. *Overlap*: two stages of equal work, one thread each (this process and one embedded worker). Batches per second in
   the steady state, over 1 / (compute time per batch of the slower stage, measured alone in the same run).
2. *Cost*: one embedded worker, ``in_flight=1``, MobileNetV2 at batch 64: median time per step over that of a plain
   Trainer, in alternation, all with one thread; and where the difference goes.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import statistics
import time
from functools import partial
from typing import Any

import lightning as L
import torch
import torchvision
from classifier import Classifier
from report import Report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.graph import Chain, StageModule, trace
from lightning_accept.pipeline.stage import Job, StageExecutor

raw_strategy = partial(AccEPTStrategy, forward_codec="raw", backward_codec="raw")


class Clock(L.Callback):
    """When each batch ended, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.stats: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Write down the time."""
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Keep the pipeline's figures."""
        if isinstance(trainer.strategy, AccEPTStrategy):
            self.stats = trainer.strategy.stats()

    def steps(self, skip_first: int, skip_last: int) -> list[float]:
        """Seconds between the ends of successive batches in the steady state."""
        kept = self.times[skip_first : len(self.times) - skip_last]
        return [second - first for first, second in itertools.pairwise(kept)]


def fit(net: nn.Module, data: TensorDataset, batch: int, strategy: Any) -> Clock:
    """Train one epoch and return its clock."""
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=1,
        strategy=strategy,
        accelerator="cpu",
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(net), DataLoader(data, batch))
    return clock


def images(count: int, size: int) -> TensorDataset:
    """Random images with labels."""
    return TensorDataset(torch.randn(count, 3, size, size), torch.randint(0, 10, (count,)))


def equal_halves(width: int) -> nn.Sequential:
    """Two halves of the same work: eight equal convolutions, a stem and a head of next to no work."""
    stem = nn.Conv2d(3, width, 4, 4)
    blocks = [nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def stage_seconds(net: nn.Module, x: Tensor, target: Tensor, first_of_second: str, repeats: int) -> list[float]:
    """Median seconds per batch of each stage alone: forward, backward and update; the first one's loss included."""
    traced = trace(net, (x,), {})
    chain = Chain.from_trace(traced)
    names = [layer.name for layer in chain.layers]
    edges = [0, names.index(first_of_second), len(names)]
    samples: list[list[float]] = [[], []]
    stages = []
    for number in range(2):
        program = chain.program(edges[number], edges[number + 1])
        parameters = {name: traced.parameters[name] for name in program.parameters}
        buffers = {name: traced.buffers[name] for name in program.buffers}
        module = StageModule(program, parameters, buffers, program.constants, torch.device("cpu"))
        optimizer = torch.optim.SGD(module.parameters.values(), lr=1e-3, momentum=0.9)
        stages.append(StageExecutor(module, [optimizer], weight_prediction=False, seed=None, stage=number))
    options = [{"lr": 1e-3, "momentum": 0.9}]
    for batch in range(repeats):
        marks = [time.perf_counter()]
        middle, needs_grad = stages[0].forward(Job(batch, batch), [x], [False])
        marks.append(time.perf_counter())
        (output,), _ = stages[1].forward(Job(batch, batch), middle, needs_grad)
        marks.append(time.perf_counter())
        leaf = output.requires_grad_()
        nn.functional.cross_entropy(leaf, target).backward()
        marks.append(time.perf_counter())
        back = stages[1].backward(batch, [leaf.grad])
        stages[1].step(0, options)
        marks.append(time.perf_counter())
        stages[0].backward(batch, back)
        stages[0].step(0, options)
        marks.append(time.perf_counter())
        spans = [second - first for first, second in itertools.pairwise(marks)]
        samples[0].append(spans[0] + spans[2] + spans[4])
        samples[1].append(spans[1] + spans[3])
    return [statistics.median(values[2:]) for values in samples]


def overlap(report: Report, quick: bool) -> None:
    """Measure item 1."""
    batch, count = 64, 12 if quick else 40
    data = images(batch * count, 32)
    x, target = data.tensors[0][:batch], data.tensors[1][:batch]
    ratios = []
    for repeat in range(1 if quick else 5):
        net = equal_halves(128)
        alone = stage_seconds(net, x, target, "5", 6 if quick else 12)
        clock = fit(net, data, batch, raw_strategy(1, partition=["5"], worker_threads=1))
        period = statistics.median(clock.steps(6, 3))
        again = stage_seconds(net, x, target, "5", 6 if quick else 12)
        slowest = max((a + b) / 2 for a, b in zip(alone, again, strict=True))
        ratios.append(slowest / period)
        worker = clock.stats[1]
        report.row(
            "overlap",
            repeat=repeat,
            stage_0_alone_s=(alone[0] + again[0]) / 2,
            stage_1_alone_s=(alone[1] + again[1]) / 2,
            period_s=period,
            overlap=slowest / period,
            activation_bytes=clock.stats[0]["links"]["down"]["payload_bytes"]
            / clock.stats[0]["links"]["down"]["packets"],
            worker_busy=(worker["forward_seconds"] + worker["backward_seconds"]) / (worker["jobs"] * period),
        )
    report.figure("overlap_median", statistics.median(ratios))


def cost(report: Report, quick: bool) -> None:
    """Measure item 2."""
    batch, count, rounds = 64, 8 if quick else 16, 1 if quick else 5
    data = images(batch * count, 32)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return torchvision.models.mobilenet_v2(num_classes=10)

    ratios = []
    for repeat in range(rounds):
        plain = statistics.median(fit(net(), data, batch, "auto").steps(2, 0))
        clock = fit(net(), data, batch, raw_strategy(1, in_flight=1, worker_threads=1))
        ours = statistics.median(clock.steps(2, 0))
        ratios.append(ours / plain)
        down, up = clock.stats[0]["links"]["down"], clock.stats[1]["links"]
        packets = max(1, down["packets"])
        report.row(
            "cost",
            repeat=repeat,
            plain_s=plain,
            ours_s=ours,
            ratio=ours / plain,
            send_forward_s=down["send_seconds"] / packets,
            send_gradient_s=up["up"]["send_seconds"] / max(1, up["up"]["packets"]),
            send_output_s=up["down"]["send_seconds"] / max(1, up["down"]["packets"]),
            activation_bytes=down["payload_bytes"] / packets,
        )
    report.figure("cost_median", statistics.median(ratios))


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches and repeats, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    report = Report("overlap", arguments.quick)
    overlap(report, arguments.quick)
    cost(report, arguments.quick)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
