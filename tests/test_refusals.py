"""What the pipeline does not serve is refused before training."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_accept import AccEPTStrategy
from lightning_accept.refusals import check_optimizers, check_trainer


class Module(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass


class FromIterator(L.LightningModule):
    def training_step(self, dataloader_iter: Any) -> None:
        pass


def make(module: L.LightningModule | None = None, **arguments: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", strategy=AccEPTStrategy(1), logger=False, enable_checkpointing=False, **arguments
    )
    trainer.strategy._lightning_module = Module() if module is None else module
    return trainer


def test_an_ordinary_trainer_is_accepted() -> None:
    for in_flight in (None, 1, 4):
        check_trainer(make(accumulate_grad_batches=2, precision="bf16-mixed"), in_flight)
    check_trainer(make(gradient_clip_val=0.5), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 3}, r"not 3 on 1 nodes; set Trainer\(devices=1, num_nodes=1\)"),
        ({"num_nodes": 2}, "not 1 on 2 nodes"),
        ({"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}, "use 'bf16-mixed'"),
        (
            {"callbacks": [L.pytorch.callbacks.StochasticWeightAveraging(0.1)]},
            "StochasticWeightAveraging .*; remove it",
        ),
    ],
)
@pytest.mark.parametrize("in_flight", [None, 1, 4])
def test_what_is_refused_names_the_way_out(arguments: dict[str, Any], message: str, in_flight: int | None) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        check_trainer(make(**arguments), in_flight)


def test_what_needs_one_batch_in_flight() -> None:
    manual = Module()
    manual.automatic_optimization = False
    for module, what in ((manual, "manual optimization"), (FromIterator(), r"training_step\(dataloader_iter\)")):
        for in_flight in (None, 1):
            check_trainer(make(module), in_flight)
        with pytest.raises(
            MisconfigurationException, match=rf"{what} needs AccEPTStrategy\(in_flight=1\), not in_flight=3"
        ):
            check_trainer(make(module), 3)


def test_optimizers() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    check_optimizers([])
    check_optimizers([torch.optim.SGD(parameters, lr=0.1)])
    with pytest.raises(MisconfigurationException, match="LBFGS evaluates the loss several times per step"):
        check_optimizers([torch.optim.SGD(parameters, lr=0.1), torch.optim.LBFGS(parameters)])
