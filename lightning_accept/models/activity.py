"""The five-layer CNN for activity recognition."""

from __future__ import annotations

from collections import OrderedDict

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn

from lightning_accept.models.classifier import Classifier


class ActivityClassifier(Classifier):
    """Three convolutions and two fully connected layers, the paper's kind of model for UCI-HAR.

    Windows are float ``[batch, channels, length]``.

    Args:
        classes: Number of activities.
        channels: Channels of the sensors.
        length: Samples per window, a multiple of 8.
        optimizer: See :class:`Classifier`.
        lr_scheduler: See :class:`Classifier`.
        interval: See :class:`Classifier`.

    Raises:
        ValueError: If ``length`` is no multiple of 8, or ``interval`` neither ``epoch`` nor ``step``.
    """

    def __init__(
        self,
        classes: int = 6,
        channels: int = 9,
        length: int = 128,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        interval: str = "epoch",
    ) -> None:
        super().__init__(activity_cnn(classes, channels, length), classes, optimizer, lr_scheduler, interval)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])


def activity_cnn(classes: int = 6, channels: int = 9, length: int = 128) -> nn.Sequential:
    """The network of :class:`ActivityClassifier`; its layers are ``conv1`` to ``conv3``, ``dense1`` and ``dense2``.

    Raises:
        ValueError: If ``length`` is no multiple of 8.
    """
    if length < 8 or length % 8:
        raise ValueError(f"length={length}: give a multiple of 8, since each of three layers halves it")
    return nn.Sequential(
        OrderedDict(
            conv1=_convolution(channels, 32),
            conv2=_convolution(32, 64),
            conv3=_convolution(64, 64),
            dense1=nn.Sequential(nn.Flatten(), nn.Linear(64 * length // 8, 100), nn.ReLU()),
            dense2=nn.Linear(100, classes),
        )
    )


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(channels, out, 9, padding=4), nn.BatchNorm1d(out), nn.ReLU(), nn.MaxPool1d(2))
