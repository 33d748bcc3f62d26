"""Several dataloaders at once, and dataloaders of every make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def both(model: Any) -> Any:
    """A module trained on two loaders at once, either of which may have ended."""

    class Both(model):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            present = [part for part in batch.values() if part is not None]
            x, y = (torch.cat(parts) for parts in zip(*present, strict=True))
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

    return Both


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_combined_loader_in_flight_trains_every_batch_once(
    mode: Any, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    class Noting(both(model)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            seen.append([float(part[0][0, 0]) for part in batch.values()])
            return loss

    runs = []
    for strategy in ("auto", pipeline(4)):
        seen: list[list[float]] = []
        trainer(strategy).fit(seeded(Noting), CombinedLoader({"a": loader(5), "b": loader(3, seed=1)}, mode))
        runs.append(seen)
    assert runs[0] == runs[1]


def test_reload_dataloaders_every_n_epochs(model: Any, seeded: Any, loader: Any, trainer: Any, agree: Any) -> None:
    class Reloading(model):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(3, seed=self.current_epoch)

    def run(strategy: Any) -> Any:
        module = seeded(Reloading)
        trainer(strategy, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module)
        return module.state_dict()

    agree(run)
