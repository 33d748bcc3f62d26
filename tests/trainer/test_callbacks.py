"""Lightning's own callbacks, profilers and plugins."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 4])


# ----- the end of training


@IN_FLIGHT
def test_max_time_ends_after_whole_batches(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer's clock is moved on by hand: time is up in the second epoch's first batch."""
    trained: list[int] = []

    class Counting(model):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            trained.append(batch_idx)

    elapsed = [0.0]
    monkeypatch.setattr(callbacks.Timer, "time_elapsed", lambda self, stage="train": elapsed[0])

    class Clock(callbacks.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            elapsed[0] = 61.0 * trainer.current_epoch

    lengths = []
    for strategy in ("auto", pipeline(in_flight)):
        trained.clear()
        elapsed[0] = 0.0
        fit = trainer(strategy, max_epochs=9, max_time={"minutes": 1}, callbacks=[Clock()], accumulate_grad_batches=2)
        fit.fit(seeded(Counting), loader())
        assert fit.should_stop
        lengths.append(len(trained))
    assert 6 < lengths[0] < lengths[1] < 12 if in_flight > 1 else lengths[0] == lengths[1]
    assert in_flight == 1 or lengths[1] == 2 * fit.global_step, "what was begun is trained, up to an optimizer step"


def test_early_stopping_on_a_training_metric(seeded: Any, loader: Any, trainer: Any, agree: Any) -> None:
    def run(strategy: Any) -> Any:
        module = seeded()
        stopping = callbacks.EarlyStopping("loss", min_delta=9.0, patience=1, check_on_train_epoch_end=True)
        fit = trainer(strategy, max_epochs=5, callbacks=[stopping])
        fit.fit(module, loader())
        return fit.global_step, module.state_dict()

    assert agree(run)[0] == 12


# ----- what changes the training


def test_gradient_accumulation_scheduler(seeded: Any, loader: Any, trainer: Any, agree: Any) -> None:
    def run(strategy: Any) -> Any:
        module = seeded()
        schedule = callbacks.GradientAccumulationScheduler({0: 1, 1: 3})
        fit = trainer(strategy, max_epochs=2, callbacks=[schedule])
        fit.fit(module, loader())
        assert fit.global_step == 6 + 2
        return module.state_dict()

    agree(run, 1e-6)


def test_backbone_finetuning_unfreezes_the_backbone_on_every_stage(
    model: Any, seeded: Any, loader: Any, trainer: Any, agree: Any
) -> None:
    class Backbone(model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = list(self.net)
            self.net = nn.Sequential(nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:]))

        @property
        def backbone(self) -> nn.Module:
            return self.net[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def run(strategy: Any) -> Any:
        module = seeded(Backbone)
        finetuning = callbacks.BackboneFinetuning(1, lambda epoch: 1.5, verbose=False, initial_denom_lr=2.0)
        trainer(strategy, max_epochs=3, callbacks=[finetuning]).fit(module, loader(3))
        return module.state_dict()

    agree(run)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: callbacks.StochasticWeightAveraging(0.1), "StochasticWeightAveraging"),
        (lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5), "ModelPruning"),
    ],
)
@IN_FLIGHT
def test_callbacks_that_change_weights_on_the_central_node_are_refused(
    make: Any, name: str, in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    with pytest.raises(MisconfigurationException, match=f"{name} .* on the central node.*remove it"):
        trainer(pipeline(in_flight), callbacks=[make()]).fit(seeded(), loader())


# ----- what only looks


@IN_FLIGHT
def test_device_stats_monitor(
    in_flight: int,
    seeded: Any,
    loader: Any,
    notes: Any,
    pipeline: Any,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning.pytorch.accelerators.cpu._PSUTIL_AVAILABLE", True)
    monkeypatch.setattr("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", True)
    monkeypatch.setattr("lightning.pytorch.accelerators.cpu.get_cpu_stats", lambda: {"cpu_percent": 1.0})
    logger = notes()
    monitor = callbacks.DeviceStatsMonitor(cpu_stats=True)
    trainer(pipeline(in_flight), logger=logger, callbacks=[monitor], log_every_n_steps=1).fit(seeded(), loader())
    names = {name for _, metrics in logger.metrics for name in metrics}
    assert any("cpu_percent" in name for name in names)


@IN_FLIGHT
@pytest.mark.parametrize("kind", ["simple", "advanced", "pytorch"])
def test_profilers(
    kind: str, in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    profiler = {
        "simple": lambda: SimpleProfiler(tmp_path, "profile"),
        "advanced": lambda: AdvancedProfiler(tmp_path, "profile"),
        "pytorch": lambda: PyTorchProfiler(tmp_path, "profile", export_to_chrome=False, record_module_names=False),
    }[kind]()
    trainer(pipeline(in_flight), profiler=profiler).fit(seeded(), loader())
    text = "".join(path.read_text() for path in tmp_path.glob("fit-profile*.txt"))
    assert "training_step" in text
    assert kind == "pytorch" or "optimizer_step" in text


@IN_FLIGHT
def test_model_summary_counts_all_parameters(
    in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = seeded()
    caplog.set_level("INFO", "lightning.pytorch")
    trainer(pipeline(in_flight), enable_model_summary=True, fast_dev_run=1).fit(module, loader())
    trainable = sum(p.numel() for p in module.parameters())
    assert f"{trainable} " in caplog.text
    assert "Trainable params" in caplog.text


# ----- checkpoints


def restored(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def test_model_checkpoint_saves_the_same_files_as_plain_lightning(
    seeded: Any, loader: Any, trainer: Any, agree: Any, tmp_path: Path
) -> None:
    """Every n steps, the best ones by a metric, the last one: names and contents."""

    def run(strategy: Any) -> Any:
        folder = tmp_path / type(strategy).__name__
        saving = [
            callbacks.ModelCheckpoint(folder / "steps", every_n_train_steps=4, save_top_k=-1),
            callbacks.ModelCheckpoint(
                folder / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}"
            ),
            callbacks.ModelCheckpoint(folder / "weights", save_weights_only=True, every_n_epochs=2, save_top_k=-1),
        ]
        fit = trainer(strategy, max_epochs=3, callbacks=saving, enable_checkpointing=True)
        fit.fit(seeded(), loader(), loader(2, seed=1))
        paths = sorted(folder.rglob("*.ckpt"))
        files = {str(path.relative_to(folder)): restored(path) for path in paths}
        wanted = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
        return {name: {key: value for key, value in file.items() if key in wanted} for name, file in files.items()}

    files = agree(run)
    assert {name.split("/")[0] for name in files} == {"steps", "best", "weights"}
    assert "best/last.ckpt" in files
    assert len(files) == 4 + 3 + 1
    assert "optimizer_states" not in next(file for name, file in files.items() if name.startswith("weights"))


@IN_FLIGHT
def test_async_checkpointing_writes_what_was_trained_when_it_was_asked_to(
    in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    """Training goes on while the file is written: it must hold a copy, not what the weights are later."""
    files = []
    for plugin in (None, AsyncCheckpointIO()):
        folder = tmp_path / type(plugin).__name__
        saving = callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        plugins = [] if plugin is None else [plugin]
        fit = trainer(pipeline(in_flight), callbacks=[saving], enable_checkpointing=True, plugins=plugins)
        fit.fit(seeded(), loader())
        files.append({path.name: restored(path) for path in sorted(folder.glob("*.ckpt"))})
    assert list(files[0]) == list(files[1])
    assert len(files[0]) == 3
    for name, file in files[0].items():
        torch.testing.assert_close(files[1][name]["state_dict"], file["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(files[1][name]["optimizer_states"], file["optimizer_states"], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*no last checkpoint available")
@IN_FLIGHT
def test_a_checkpoint_on_an_exception_holds_the_trained_weights(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    class Failing(model):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise RuntimeError("the user's own")

    saving = callbacks.OnExceptionCheckpoint(tmp_path)
    module = seeded(Failing)
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer(pipeline(in_flight), callbacks=[saving], enable_checkpointing=True).fit(module, loader())
    saved = restored(tmp_path / "on_exception.ckpt")
    three = seeded()
    trainer(pipeline(in_flight), limit_train_batches=3).fit(three, loader())
    assert saved["global_step"] == 3
    torch.testing.assert_close(saved["state_dict"], three.state_dict(), rtol=0, atol=0)


def test_a_timer_callback_and_train_time_interval_checkpoint(
    seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    timer = callbacks.Timer(timedelta(hours=1))
    saving = callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), save_top_k=-1)
    trainer(pipeline(4), callbacks=[timer, saving], enable_checkpointing=True).fit(seeded(), loader(3))
    steps = sorted(restored(tmp_path / name)["global_step"] for name in os.listdir(tmp_path))
    assert steps == [1, 2, 3]
    assert timer.time_elapsed("train") > 0
