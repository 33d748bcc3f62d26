"""The classifier that benchmarks train on emulated devices, and where only times count."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Classifier(L.LightningModule):
    """A classifier around a network, trained by SGD with momentum.

    Args:
        net: The network.
        rate: The learning rate.
        rise: Steps in which the learning rate rises to it in equal parts.
    """

    def __init__(self, net: nn.Module, rate: float = 1e-3, rise: int = 0) -> None:
        super().__init__()
        self.net = net
        self.rate = rate
        self.rise = rise

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def configure_optimizers(self) -> Any:
        """SGD with momentum."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        if not self.rise:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.rise))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def accuracy(net: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Part of the samples that are recognised. Leaves the network in eval mode."""
    net.eval()
    with torch.inference_mode():
        answers = torch.cat([net(some).argmax(1) for some in inputs.split(250)])
    return (answers == labels).float().mean().item()
