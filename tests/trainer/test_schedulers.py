"""Learning rates that change while training reach every stage, at the step that they are meant for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SCHEDULES: dict[str, Any] = {
    "one cycle, every step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=18),
        "interval": "step",
    },
    "every second step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        "interval": "step",
        "frequency": 2,
    },
    "every epoch": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.1),
    "plateau": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0, threshold=9.0),
        "monitor": "val_loss",
    },
    "plateau of a training metric, every step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
        "monitor": "loss",
        "interval": "step",
    },
}


def scheduled(model: Any, schedule: Any) -> Any:
    class Scheduled(model):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}

    return Scheduled


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_scheduler_equals_plain_training(
    name: str, model: Any, seeded: Any, loader: Any, notes: Any, trainer: Any, agree: Any
) -> None:
    def run(strategy: Any) -> Any:
        module, logger = seeded(scheduled(model, SCHEDULES[name])), notes()
        monitor = LearningRateMonitor(log_momentum=True)
        fit = trainer(strategy, max_epochs=3, logger=logger, log_every_n_steps=1, callbacks=[monitor])
        fit.fit(module, loader(), loader(2, seed=1))
        rates = [metrics["lr-SGD"] for _, metrics in logger.metrics if "lr-SGD" in metrics]
        assert len(set(rates)) > 1, "the rate has changed"
        return {"metrics": logger.metrics, "state": module.state_dict()}

    agree(run)


def test_in_flight_a_rate_of_nil_stops_every_stage_at_its_step(
    model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    """The updates after the third have rate 0, although their batches are in flight with the first three."""

    class Plain(model):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    whole, three = seeded(Plain), seeded(Plain)
    trainer(pipeline(4)).fit(whole, loader(9))
    trainer(pipeline(4), max_steps=3).fit(three, loader(9))
    torch.testing.assert_close(whole.state_dict(), three.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_early_stopping_ends_after_the_same_epoch(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    epochs = []
    for strategy in ("auto", pipeline(in_flight)):
        stopping = EarlyStopping("val_loss", min_delta=9.0, patience=1)
        fit = trainer(strategy, max_epochs=9, callbacks=[stopping])
        fit.fit(seeded(), loader(), loader(2, seed=1))
        assert fit.global_step == 6 * fit.current_epoch
        epochs.append((fit.current_epoch, stopping.stopped_epoch))
    assert epochs[0] == epochs[1]
    assert epochs[0][0] < 9


@pytest.mark.parametrize("in_flight", [1, 4])
def test_early_stopping_at_a_validation_within_the_epoch_trains_what_is_begun(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    steps = []
    for strategy in ("auto", pipeline(in_flight)):
        stopping = EarlyStopping("val_loss", min_delta=9.0, patience=1)
        fit = trainer(strategy, max_epochs=9, callbacks=[stopping], val_check_interval=2)
        fit.fit(seeded(), loader(), loader(2, seed=1))
        steps.append(fit.global_step)
    assert steps[0] == steps[1] == 4
