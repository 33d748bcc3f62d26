"""Validation, test and predict: within an epoch, before training, alone, and in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 4])


@pytest.mark.parametrize(
    "arguments",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 0.5, "max_epochs": 2},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
    ],
)
def test_validation_within_an_epoch_sees_the_weights_of_its_step(
    arguments: dict[str, Any], seeded: Any, loader: Any, notes: Any, trainer: Any, agree: Any
) -> None:
    def run(strategy: Any) -> Any:
        logger = notes()
        trainer(strategy, logger=logger, **arguments).fit(seeded(), loader(), loader(2, seed=1))
        return [(step, metrics) for step, metrics in logger.metrics if "val_loss" in metrics]

    assert len(agree(run)) >= 3


def test_in_flight_validation_within_an_epoch_sees_all_trained_batches_and_no_others(
    seeded: Any, loader: Any, notes: Any, pipeline: Any, trainer: Any
) -> None:
    """The validation after four batches equals that of a run which ends with them."""
    results = []
    for arguments in ({"val_check_interval": 4}, {"limit_train_batches": 4}):
        logger = notes()
        trainer(pipeline(4), logger=logger, **arguments).fit(seeded(), loader(), loader(2, seed=1))
        results.append(next(metrics for step, metrics in logger.metrics if "val_loss" in metrics))
    assert results[0] == results[1]


@IN_FLIGHT
@pytest.mark.parametrize(("asked", "expected"), [(0, 0), (2, 2), (-1, 3)])
def test_sanity_validation_runs_as_many_batches_as_asked(
    asked: int, expected: int, in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    class Counting(model):  # type: ignore[misc]
        sanity = 0

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            self.sanity += self.trainer.sanity_checking

    module = seeded(Counting)
    trainer(pipeline(in_flight), num_sanity_val_steps=asked).fit(module, loader(2), loader(3, seed=1))
    assert module.sanity == expected


@IN_FLIGHT
@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_alone_as_in_plain_lightning(
    entry: str, in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    results = [
        getattr(trainer(strategy), entry)(seeded(), loader(3), **({} if entry == "predict" else {"verbose": False}))
        for strategy in ("auto", pipeline(in_flight))
    ]
    torch.testing.assert_close(results[1], results[0])


@IN_FLIGHT
def test_fit_test_predict_and_fit_again_with_one_trainer(
    in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    results = []
    for strategy in ("auto", pipeline(in_flight)):
        module, run = seeded(), trainer(strategy)
        run.fit(module, loader())
        first = run.test(module, loader(2, seed=1), verbose=False)
        predictions = run.predict(module, loader(2, seed=1))
        run.fit_loop.max_epochs = 2
        run.fit(module, loader())
        assert run.global_step == 12
        results.append([first, predictions, run.test(module, loader(2, seed=1), verbose=False)])
        assert first != results[-1][-1]
    if in_flight == 1:
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@IN_FLIGHT
def test_several_validation_dataloaders(
    in_flight: int, seeded: Any, loader: Any, notes: Any, pipeline: Any, trainer: Any
) -> None:
    logged = []
    for strategy in ("auto", pipeline(in_flight)):
        logger = notes()
        loaders = [loader(3, seed=1), loader(2, seed=2)]
        trainer(strategy, logger=logger, limit_train_batches=1).fit(seeded(), loader(), loaders)
        logged.append(logger.metrics)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(logged[0][-1][1])
    torch.testing.assert_close(logged[1], logged[0])


@IN_FLIGHT
def test_a_checkpoint_given_to_test_is_loaded(
    in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Any
) -> None:
    module, run = seeded(), trainer(pipeline(in_flight))
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "a.ckpt")
    expected = run.test(module, loader(2, seed=1), verbose=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    again = run.test(module, loader(2, seed=1), ckpt_path=tmp_path / "a.ckpt", weights_only=True, verbose=False)
    assert again == expected


@IN_FLIGHT
def test_a_train_mode_that_the_user_changes_in_validation(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    """Monte Carlo dropout aside: eval mode is in force on all stages in validation, train mode again afterwards."""

    class Dropping(model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 3))
            self.outputs: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.outputs += [self.net(batch[0])]

    module = seeded(Dropping)
    run = trainer(pipeline(in_flight), num_sanity_val_steps=1, limit_train_batches=1)
    run.fit(module, loader(), loader(1, seed=1))
    assert len(module.outputs) == 2
    module.eval()
    (x, _) = next(iter(loader(1, seed=1)))
    torch.testing.assert_close(module.outputs[1], module.net(x).detach())
