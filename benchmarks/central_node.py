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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
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
        if len(self.times) == self._batches and foresight.forecast is not None:
            medians, _ = foresight.look(threshold=1e9)
            self.end = {
                "period": foresight.period(foresight.forecast),
                "rest_seconds": foresight.loss_seconds,
                "stages": {stage: vars(median) for stage, median in medians.items()},
                "links": _links(foresight),
            }

    def write(self, path: Path, **more: Any) -> None:
        """Write all as JSON."""
        document = {"times": self.times, "plans": self.plans, "log": self.lines, "end": self.end, **more}
        path.write_text(json.dumps(document, indent=1))


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
    """The network called ``name``, for images of [3, 32, 32] in ten classes.

    MobileNetV2 is a narrow one, so that the slowest links need not carry its weights for minutes.
    """
    return blocks_net() if name == "blocks" else torchvision.models.mobilenet_v2(num_classes=10, width_mult=0.35)


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
    parser.add_argument("--workers", nargs="+", required=True, help="URLs in the order of their stages")
    parser.add_argument("--result", type=Path, required=True, help="file for the result")
    parser.add_argument("--net", choices=["mobilenet", "blocks"], default="mobilenet")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--latency", default="measured", help="as AccEPTStrategy's")
    parser.add_argument("--feedback", type=int, help="look at the stages' times every so many batches")
    parser.add_argument("--repartition", type=int, help="make a new plan every so many batches")
    parser.add_argument("--cooldown", type=int, default=20)
    parser.add_argument("--try-all", type=int, help="go through all partitions, so many batches each")
    return parser.parse_args()


def main() -> None:
    """Train once."""
    arguments = parse()
    print("ready", flush=True)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    recorder = Recorder(arguments.batches)
    callbacks: list[L.Callback] = [recorder]
    if arguments.feedback:
        callbacks.append(PredictorFeedback(arguments.feedback))
    if arguments.repartition:
        callbacks.append(Repartition(arguments.repartition, cooldown=arguments.cooldown))
    tries = TryAll(arguments.try_all) if arguments.try_all else None
    if tries is not None:
        callbacks.append(tries)
    logger = logging.getLogger("lightning_accept")
    logger.setLevel(logging.INFO)
    logger.addHandler(Lines(recorder))
    batches, size = arguments.batches, arguments.batch_size
    data = TensorDataset(torch.randn(4 * size, 3, 32, 32), torch.randint(0, 10, (4 * size,)))
    # The same few batches again and again: only times count here.
    order = [index for batch in range(batches) for index in range(batch % 4 * size, (batch % 4 + 1) * size)]
    trainer = L.Trainer(
        max_epochs=1,
        strategy=AccEPTStrategy(workers=arguments.workers, latency=arguments.latency),
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(make_net(arguments.net)), DataLoader(data, size, sampler=order))
    recorder.write(arguments.result, tried=tries.tried if tries is not None else [])


if __name__ == "__main__":
    main()
