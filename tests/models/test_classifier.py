"""What the models have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau as WatchingPlateau
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept.models import Classifier


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))


def loader() -> DataLoader[Any]:
    labels = torch.arange(30) % 3
    inputs = nn.functional.one_hot(labels, 3).float().repeat(1, 4).view(30, 3, 4)
    return DataLoader(TensorDataset(inputs, labels), 10)


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


def test_it_learns_and_logs() -> None:
    model = Classifier(net(), 3, partial(torch.optim.SGD, lr=0.8), partial(StepLR, step_size=1, gamma=0.5))
    run = trainer(max_epochs=3)
    run.fit(model, loader(), loader())
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(run.callback_metrics)
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(0.1)
    (tested,) = run.test(model, loader(), verbose=False)
    assert tested["test_accuracy"] == 1 and tested["test_loss"] < 1
    predicted = run.predict(model, loader())
    assert torch.cat(predicted).tolist() == [n % 3 for n in range(30)]


def test_default_optimizer() -> None:
    optimizer = Classifier(net(), 3).configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.02, 0.9, 5e-4)


def test_given_optimizer_and_scheduler_of_steps() -> None:
    model = Classifier(
        net(), 3, partial(torch.optim.AdamW, lr=0.1), partial(OneCycleLR, max_lr=0.1, total_steps=9), "step"
    )
    made = model.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.AdamW)
    assert isinstance(made["lr_scheduler"]["scheduler"], OneCycleLR) and made["lr_scheduler"]["interval"] == "step"


@pytest.mark.parametrize(
    ("scheduler", "monitor"), [(ReduceLROnPlateau, "val_loss"), (partial(WatchingPlateau, monitor="x"), "x")]
)
def test_plateau_watches_something(scheduler: Any, monitor: str) -> None:
    assert Classifier(net(), 3, lr_scheduler=scheduler).configure_optimizers()["lr_scheduler"]["monitor"] == monitor


def test_interval_is_checked() -> None:
    with pytest.raises(ValueError, match="interval='batch': give 'epoch' or 'step'"):
        Classifier(net(), 3, interval="batch")
