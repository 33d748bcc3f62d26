"""The classifier that benchmarks train where only times count."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Classifier(L.LightningModule):
    """A classifier around a network, trained by SGD with momentum."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
