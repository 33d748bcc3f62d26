"""What the tests of the Trainer's features share: a small module, workers in memory, and a logger that only notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

BATCHES = 6
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Classifier(L.LightningModule):
    """A small classifier that logs as users do."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            *(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        output = self.net(batch[0])
        self.accuracy(output, batch[1])
        self.log_dict(
            {"val_loss": nn.functional.cross_entropy(output, batch[1]), "accuracy": self.accuracy},
        )

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[0])
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Notes(Logger):
    """A logger that keeps everything it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.hyper_parameters: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.hyper_parameters.update(dict(params))


def make_loader(batches: int = BATCHES, seed: int = 0, batch_size: int = 4, **arguments: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * batch_size, 6, generator=generator)
    y = torch.randint(0, 3, (batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size, **arguments)


def make_pipeline(in_flight: Any = 1, workers: int = 2, **arguments: Any) -> AccEPTStrategy:
    codecs = {"forward_codec": "raw", "backward_codec": "raw"}
    places = MemoryCluster(workers, build_stage).workers
    return AccEPTStrategy(places, in_flight=in_flight, **{**codecs, **arguments})


def make_trainer(strategy: Any, **arguments: Any) -> L.Trainer:
    return L.Trainer(**{**QUIET, **arguments}, strategy=strategy)


@pytest.fixture
def model() -> type[Classifier]:
    """The module's class; seeds are set anew, so that two of it are equal after ``seed``."""
    return Classifier


@pytest.fixture
def seeded() -> Callable[..., Any]:
    """Makes a module from a fixed seed."""

    def make(cls: Callable[..., Any] = Classifier, *args: Any, **kwargs: Any) -> Any:
        L.seed_everything(5, verbose=False)
        return cls(*args, **kwargs)

    return make


@pytest.fixture
def notes() -> type[Notes]:
    return Notes


@pytest.fixture
def loader() -> Callable[..., DataLoader[Any]]:
    return make_loader


@pytest.fixture
def pipeline() -> Callable[..., AccEPTStrategy]:
    return make_pipeline


@pytest.fixture
def trainer() -> Callable[..., L.Trainer]:
    return make_trainer


@pytest.fixture
def agree() -> Callable[..., Any]:
    """Asserts that a run is the same on one device and with one batch in flight; returns the latter's result."""

    def check(run: Callable[[Any], Any], tolerance: float = 0.0) -> Any:
        plain, ours = run("auto"), run(make_pipeline(1))
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
        return ours

    return check
