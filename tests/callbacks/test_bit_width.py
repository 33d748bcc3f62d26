"""BitWidthScheduler: when it steps, what it sets, and what it remembers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy, BitWidthScheduler, MultiBit
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

pytestmark = pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'. 'epoch'")

MakeSchedule = Callable[[Any], Any]


class Model(L.LightningModule):
    def __init__(self, make_schedule: MakeSchedule | None, interval: str = "epoch", rates: Sequence[float] = (1.0,)):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.make_schedule = make_schedule
        self.interval = interval
        self.rates = rates

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("flat", 1.0)
        result: Tensor = self.net(batch[0]).square().mean() * 1e-3
        return result

    def configure_optimizers(self) -> Any:
        parameters = list(self.net.parameters())
        groups = [{"params": parameters[n :: len(self.rates)], "lr": rate} for n, rate in enumerate(self.rates)]
        optimizer = torch.optim.SGD(groups, lr=self.rates[0])
        if self.make_schedule is None:
            return optimizer
        schedule = {"scheduler": self.make_schedule(optimizer), "interval": self.interval, "monitor": "flat"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Recorder(L.Callback):
    """The largest rate and the bit widths in force in every batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.forward: list[int] = []
        self.backward: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        bits = trainer.strategy.bits
        self.forward.append(bits["forward"])
        self.backward.append(bits["backward"])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.rates.append(max(group["lr"] for group in trainer.optimizers[0].param_groups))


def fit(
    model: Model,
    scheduler: BitWidthScheduler,
    *,
    epochs: int = 1,
    batches: int = 1,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
    strategy: Any = None,
    **codecs: Any,
) -> Recorder:
    recorder = Recorder()
    trainer = L.Trainer(
        max_epochs=epochs,
        strategy=strategy or AccEPTStrategy(MemoryCluster(1, build_stage).workers, in_flight=1, **codecs),
        accelerator="cpu",
        callbacks=[scheduler, *callbacks, *([recorder] if strategy is None else [])],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(2 * batches, 4)), 2), ckpt_path=ckpt_path)
    return recorder


def falls(rates: Sequence[float]) -> list[int]:
    """For every batch, how often the rate has fallen so far."""
    return [sum(rates[n] < rates[n - 1] for n in range(1, index + 1)) for index in range(len(rates))]


STAIRS: dict[str, MakeSchedule] = {
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2, gamma=0.9),
    "MultiStepLR": lambda optimizer: schedules.MultiStepLR(optimizer, [1, 2, 5], gamma=0.9),
    "ReduceLROnPlateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.9, patience=1),
}


@pytest.mark.parametrize("name", STAIRS)
def test_stairs_step_at_every_fall(name: str) -> None:
    scheduler = BitWidthScheduler()
    recorder = fit(Model(STAIRS[name]), scheduler, epochs=8)
    fallen = falls(recorder.rates)
    assert fallen[-1] >= 3
    assert recorder.forward == [(2, 3, 4, 4)[min(count, 3)] for count in fallen]
    assert recorder.backward == [8 if count == 0 else 4 for count in fallen]
    assert scheduler.bits == {"forward": 4, "backward": 4}


def test_stairs_within_an_epoch() -> None:
    step_lr = lambda optimizer: schedules.StepLR(optimizer, 3, gamma=0.99)  # noqa: E731
    recorder = fit(Model(step_lr, "step"), BitWidthScheduler(), batches=8)
    assert recorder.forward == [2, 2, 2, 3, 3, 3, 4, 4]


MOVING: dict[str, MakeSchedule] = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 20),
    "OneCycle": lambda optimizer: schedules.OneCycleLR(optimizer, 1.0, total_steps=22),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "StepLR at every step": lambda optimizer: schedules.StepLR(optimizer, 1, 0.9),
    "warm-up, then cosine": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, 1.0, 5), schedules.CosineAnnealingLR(optimizer, 15)],
        milestones=[5],
    ),
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedules_that_move_all_the_time_step_at_every_halving(name: str, interval: str) -> None:
    batches, epochs = (20, 1) if interval == "step" else (1, 20)
    recorder = fit(Model(MOVING[name], interval), BitWidthScheduler(), batches=batches, epochs=epochs)
    rates = recorder.rates
    top = rates.index(max(rates))
    first = next(index for index in range(top, 20) if rates[index] <= rates[top] / 2)
    second = next(index for index in range(first, 20) if rates[index] <= rates[first] / 2)
    assert top < first < second
    assert recorder.forward == [2] * first + [3] * (second - first) + [4] * (20 - second)
    assert recorder.backward == [8] * first + [4] * (20 - first)


def test_a_rise_is_never_a_step_and_raises_the_peak() -> None:
    values = [1.0, 0.6, 0.2, 0.7, 1.5, 0.8, 0.7]  # 0.2: a step; then 1.5 is the peak, and 0.7 its half
    table = lambda optimizer: schedules.LambdaLR(optimizer, lambda step: [*values, 0.7][step])  # noqa: E731
    recorder = fit(Model(table, "step"), BitWidthScheduler(), batches=7)
    assert recorder.forward == [2, 2, 3, 3, 3, 3, 4]


def test_fraction_moves_the_threshold_and_one_counts_every_fall() -> None:
    values = [1.0, 0.95, 0.95, 0.7, 0.7, 0.7]
    table = lambda optimizer: schedules.LambdaLR(optimizer, lambda step: [*values, 0.7][step])  # noqa: E731
    assert fit(Model(table, "step"), BitWidthScheduler(fraction=0.8), batches=6).forward == [2, 2, 2, 3, 3, 3]
    assert fit(Model(table, "step"), BitWidthScheduler(fraction=1), batches=6).forward == [2, 3, 3, 4, 4, 4]


def test_the_largest_rate_of_all_groups_decides() -> None:
    tables = [lambda step: 0.1**step, lambda step: 1.0 if step < 3 else 0.4]
    table = lambda optimizer: schedules.LambdaLR(optimizer, tables)  # noqa: E731
    recorder = fit(Model(table, "step", rates=(1.0, 0.5)), BitWidthScheduler(fraction=0.45), batches=5)
    assert recorder.rates == pytest.approx([1.0, 0.5, 0.5, 0.2, 0.2])
    assert recorder.forward == [2, 2, 2, 3, 3]


def test_a_rate_set_without_a_scheduler_is_watched_too() -> None:
    class Halving(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5

    assert fit(Model(None), BitWidthScheduler(), batches=4, callbacks=[Halving()]).forward == [2, 3, 4, 4]


def test_lists_of_any_length() -> None:
    recorder = fit(Model(STAIRS["StepLR"]), BitWidthScheduler(forward=[3], backward=[8, 6, 5, 4]), epochs=9)
    assert recorder.forward == [3] * 9
    assert recorder.backward == [8, 8, 6, 6, 5, 5, 4, 4, 4]


def test_every_change_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_accept"):
        fit(Model(STAIRS["StepLR"]), BitWidthScheduler(), epochs=7)
    lines = [record.getMessage() for record in caplog.records if "bit widths" in record.getMessage()]
    assert lines[0] == "bit widths: 2 forward, 8 backward"
    assert lines[1].startswith("bit widths: 2 -> 3 forward, 8 -> 4 backward, from batch 0 of epoch 2 on")
    assert "fell from 1 to 0.9" in lines[1]
    assert len(lines) == 3


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_resumed_training_goes_on_with_its_bits(stop: int, tmp_path: Path) -> None:
    """Wherever the training is cut, also right before and right after a step."""
    whole = fit(Model(STAIRS["StepLR"]), BitWidthScheduler(), epochs=6)
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_last=True)
    fit(Model(STAIRS["StepLR"]), BitWidthScheduler(), epochs=stop, callbacks=[saving])
    path = str(tmp_path / "last.ckpt")
    state = torch.load(path, weights_only=True)["callbacks"]["BitWidthScheduler"]
    assert set(state) == {"steps", "peak"}
    if stop == 5:
        assert state["steps"] == 2
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    rest = fit(Model(STAIRS["StepLR"]), BitWidthScheduler(), epochs=6, callbacks=[saving], ckpt_path=path)
    assert rest.rates == whole.rates[stop:]
    assert rest.forward == whole.forward[stop:]
    assert rest.backward == whole.backward[stop:]


def test_a_checkpoint_of_a_longer_list_ends_at_the_last_width() -> None:
    scheduler = BitWidthScheduler(forward=(2, 3), backward=(8,))
    scheduler.load_state_dict({"steps": 5, "peak": 1.0})
    assert scheduler.steps == 1
    assert scheduler.bits == {"forward": 3, "backward": 8}


def test_another_fit_starts_anew() -> None:
    scheduler = BitWidthScheduler()
    fit(Model(STAIRS["StepLR"]), scheduler, epochs=5)
    assert scheduler.bits["forward"] == 4
    assert fit(Model(STAIRS["StepLR"]), scheduler, epochs=1).forward == [2]


def test_another_strategy_is_left_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    fit(Model(STAIRS["StepLR"]), BitWidthScheduler(), epochs=5, strategy="auto")
    records = [record for record in caplog.records if record.name == "lightning_accept"]
    assert [record.levelname for record in records] == ["WARNING"]
    assert "needs AccEPTStrategy, not SingleDeviceStrategy" in records[0].getMessage()


def test_a_width_that_the_codec_refuses_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"forward_codec.*bits must be an integer from 1 to 8, not 9"):
        fit(Model(STAIRS["StepLR"]), BitWidthScheduler(forward=(2, 9)), forward_codec=MultiBit())


@pytest.mark.parametrize(
    "arguments",
    [
        {"forward": ()},
        {"forward": (2.0,)},
        {"backward": (0,)},
        {"backward": (True,)},
        {"fraction": 0},
        {"fraction": 1.1},
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BitWidthScheduler(**arguments)
