"""Classifier: what the models of this package have in common."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override


class Classifier(LightningModule):
    """Trains ``net`` with cross entropy on batches of inputs and labels ``[batch]``.

    Logs ``train_loss``, ``val_loss``, ``val_accuracy``, ``test_loss`` and ``test_accuracy``. Predicts classes.

    Args:
        net: Maps a batch of inputs to logits ``[batch, classes]``.
        classes: Number of classes.
        optimizer: Makes the optimizer from the parameters; by default SGD with a learning rate of 0.02, momentum 0.9
            and weight decay 5e-4.
        lr_scheduler: Makes the scheduler from the optimizer; by default the learning rate stays. ReduceLROnPlateau
            watches ``val_loss``, unless it is given another ``monitor``.
        interval: Whether the scheduler steps after every ``epoch`` or every ``step``.

    Raises:
        ValueError: If ``interval`` is neither.
    """

    def __init__(
        self,
        net: nn.Module,
        classes: int,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        interval: str = "epoch",
    ) -> None:
        super().__init__()
        if interval not in ("epoch", "step"):
            raise ValueError(f"interval={interval!r}: give 'epoch' or 'step'")
        self.net = net
        self._make_optimizer = optimizer
        self._make_scheduler = lr_scheduler
        self._interval = interval
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(classes, average="micro")

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.net(inputs)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True, batch_size=len(labels))

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.net(inputs)
        self.test_accuracy(logits, labels)
        self.log("test_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("test_accuracy", self.test_accuracy, batch_size=len(labels))

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(dim=1)  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Any:
        if self._make_optimizer is not None:
            optimizer = self._make_optimizer(self.parameters())
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        settings: dict[str, Any] = {"scheduler": scheduler, "interval": self._interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            settings["monitor"] = getattr(scheduler, "monitor", "val_loss")
        return {"optimizer": optimizer, "lr_scheduler": settings}
