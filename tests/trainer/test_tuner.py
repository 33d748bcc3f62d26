"""The Tuner: learning-rate search and batch-size scaling."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_lr_find(in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any) -> None:
    """The rates tried and the losses are plain training's, and the module is as it was afterwards."""
    found = []
    for strategy in ("auto", pipeline(in_flight)):
        module = seeded()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        fit = trainer(strategy)
        finder = Tuner(fit).lr_find(module, loader(20), num_training=20, min_lr=1e-4, max_lr=1e-1)
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        assert module.lr == finder.suggestion()
        fit.fit(module, loader(3))
        assert fit.global_step == 3
        found.append(finder.results)
    assert found[0]["lr"] == found[1]["lr"]
    torch.testing.assert_close(found[1]["loss"], found[0]["loss"], rtol=0, atol=1e-6 if in_flight == 1 else 0.1)


@pytest.mark.parametrize(("mode", "in_flight"), [("power", 1), ("power", 4), ("binsearch", 4)])
def test_scale_batch_size(
    mode: str,
    in_flight: int,
    model: Any,
    seeded: Any,
    loader: Any,
    pipeline: Any,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Lightning collects garbage before every trial, which takes seconds in a process that runs tests.
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)

    class Data(L.LightningDataModule):
        batch_size = 2

        def val_dataloader(self) -> Any:
            return loader(1, seed=1)

        def train_dataloader(self) -> Any:
            return loader(32 // self.batch_size, batch_size=self.batch_size)

    class Large(model):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 8:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    sizes = []
    for strategy in ("auto", pipeline(in_flight)):
        module, data = seeded(Large), Data()
        sizes.append(Tuner(trainer(strategy)).scale_batch_size(module, datamodule=data, mode=mode, steps_per_trial=2))
        assert data.batch_size == sizes[-1]
    assert sizes[0] == sizes[1]
    assert sizes[0] in (7, 8)
