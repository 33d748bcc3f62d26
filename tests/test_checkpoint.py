"""Checkpoints are ordinary ones, whatever trained the model and whatever was in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

BATCHES = 8


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()),
            *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * 4, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (len(x),), generator=generator)), 4)


def trainer(strategy: Any, folder: Path, epochs: int, **checkpoint: Any) -> L.Trainer:
    callback = ModelCheckpoint(folder, save_top_k=-1, **checkpoint)
    return L.Trainer(
        max_epochs=epochs,
        strategy=strategy,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def pipeline(in_flight: int, workers: int = 2, **options: Any) -> AccEPTStrategy:
    codecs = {"forward_codec": "raw", "backward_codec": "raw"}
    return AccEPTStrategy(MemoryCluster(workers, build_stage).workers, in_flight=in_flight, **codecs, **options)


def new_model() -> Model:
    L.seed_everything(5, verbose=False)
    return Model()


def only(folder: Path) -> Path:
    (path,) = folder.glob("*.ckpt")
    return path


def read(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def test_a_checkpoint_equals_that_of_plain_training(tmp_path: Path) -> None:
    trainer("auto", tmp_path / "plain", 2).fit(new_model(), data())
    trainer(pipeline(1), tmp_path / "ours", 2).fit(new_model(), data())
    plain = sorted((tmp_path / "plain").glob("*.ckpt"))
    ours = sorted((tmp_path / "ours").glob("*.ckpt"))
    assert [path.name for path in ours] == [path.name for path in plain]
    for mine, theirs in zip(ours, plain, strict=True):
        first, second = read(mine), read(theirs)
        assert list(first) == list(second)
        assert list(first["state_dict"]) == list(second["state_dict"])
        torch.testing.assert_close(first["state_dict"], second["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(first["optimizer_states"], second["optimizer_states"], rtol=0, atol=0)
        assert first["lr_schedulers"] == second["lr_schedulers"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("first", ["plain", "ours"])
@pytest.mark.parametrize("second", ["plain", "one worker", "three workers"])
def test_training_goes_on_wherever_a_checkpoint_is_loaded(tmp_path: Path, first: str, second: str) -> None:
    strategies = {
        "plain": lambda: "auto",
        "ours": lambda: pipeline(1),
        "one worker": lambda: pipeline(1, 1),
        "three workers": lambda: pipeline(1, 3),
    }
    expected = new_model()
    trainer("auto", tmp_path / "whole", 3).fit(expected, data())
    trainer(strategies[first](), tmp_path / "half", 1).fit(new_model(), data())
    module = Model()
    trainer(strategies[second](), tmp_path / "rest", 3).fit(
        module, data(), ckpt_path=str(only(tmp_path / "half")), weights_only=True
    )
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)


class Halfway(L.Callback):
    """Notes the state after a step, as the checkpoint of that step must hold it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.state: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.state = {n: t.clone() for n, t in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("in_flight", [2, 4])
def test_a_checkpoint_within_an_epoch_holds_just_the_trained_batches(tmp_path: Path, in_flight: int) -> None:
    """With batches in flight: weights are those after the step that saves, and training goes on undisturbed."""
    module, halfway = new_model(), Halfway(3)
    fit = trainer(pipeline(in_flight), tmp_path, 1, every_n_train_steps=3)
    fit.callbacks.insert(0, halfway)
    fit.fit(module, data())
    assert fit.global_step == BATCHES
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 2
    saved = read(checkpoints[0])
    assert saved["global_step"] == 3
    torch.testing.assert_close(saved["state_dict"], halfway.state, rtol=0, atol=0)
    steps = {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()}
    assert steps == {3.0}, "every stage has taken three steps, no more and no fewer"


class Normed(Model):
    """BatchNorm on every stage."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [(nn.Linear(first, 8), nn.BatchNorm1d(8), nn.Tanh()) for first in (4, 8, 8)]
        self.net = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(8, 3))


@pytest.mark.parametrize(("in_flight", "micro_batches"), [(4, 1), (6, 1), (3, 2)])
def test_a_checkpoint_within_an_epoch_equals_the_end_of_a_run_that_stops_there(
    tmp_path: Path, in_flight: int, micro_batches: int
) -> None:
    """To the bit, BatchNorm's statistics included, on the central node as on the workers."""

    def strategy() -> AccEPTStrategy:
        return pipeline(in_flight, partition=[1, 2], micro_batches=micro_batches)

    modules = []
    for folder, steps in (("whole", -1), ("part", 3)):
        L.seed_everything(5, verbose=False)
        modules.append(Normed())
        fit = trainer(strategy(), tmp_path / folder, 1, every_n_train_steps=3)
        fit.fit_loop.epoch_loop.max_steps = steps
        fit.fit(modules[-1], data())
    whole, part = modules
    saved = read(next((tmp_path / "whole").glob("*step=3.ckpt")))
    torch.testing.assert_close(saved["state_dict"], dict(part.state_dict()), rtol=0, atol=0)
    for index in (1, 4, 7):
        assert saved["state_dict"][f"net.{index}.num_batches_tracked"] == 3 * micro_batches
        assert whole.net[index].num_batches_tracked == BATCHES * micro_batches
