"""Progress beside Lightning's bars: shown where these are, and silent where they are switched off."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.progress import SILENT, ProgressLine
from lightning_accept.progress_bars import progress_line
from lightning_accept.remote.memory import MemoryCluster

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(cluster: MemoryCluster | None = None, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", "logger": False, **arguments},
        strategy=AccEPTStrategy(1 if cluster is None else cluster.workers, in_flight=1),
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def test_no_bar_no_line() -> None:
    assert progress_line(make_trainer(enable_progress_bar=False)) is SILENT
    assert progress_line(make_trainer(callbacks=[TQDMProgressBar(refresh_rate=0)])) is SILENT
    assert progress_line(make_trainer(callbacks=[TQDMProgressBar()])) is not SILENT


def make_terminal(monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> Any:
    """Standard error; lines are drawn at once and often."""
    terminal = new_terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("lightning_accept.progress_bars.ProgressLine", partial(ProgressLine, delay=0.0, interval=0.001))
    return terminal


def slowed(cluster: MemoryCluster, wait_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that do not answer before what they do is shown."""
    for number, worker in enumerate(cluster.workers, 1):

        def deploy(*arguments: Any, original: Any = worker.deploy) -> int:
            wait_for("deploying 2 stages |")
            result: int = original(*arguments)
            return result

        def state(timeout: float, number: int = number, original: Any = worker.state) -> Any:
            wait_for(f"gathering stage {number} of 2 from memory://{number} |")
            return original(timeout)

        monkeypatch.setattr(worker, "deploy", deploy)
        monkeypatch.setattr(worker, "state", state)


def test_deploying_and_gathering_are_shown_while_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], new_terminal: Any
) -> None:
    terminal, cluster = make_terminal(monkeypatch, new_terminal), MemoryCluster(2, build_stage)
    slowed(cluster, terminal.wait_for, monkeypatch)
    trainer = make_trainer(cluster, callbacks=[TQDMProgressBar()])
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    assert "Epoch 0" in capsys.readouterr().out
    assert "Epoch" not in terminal.getvalue()


def test_without_lightnings_bar_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> None:
    terminal, cluster = make_terminal(monkeypatch, new_terminal), MemoryCluster(2, build_stage)
    slowed(cluster, lambda text: None, monkeypatch)
    trainer = make_trainer(cluster, enable_progress_bar=False)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    assert "deploying" not in terminal.getvalue()
    assert "gathering" not in terminal.getvalue()


class Display:
    """What of rich's Live is used: wiped out when it stops if it is transient, else left where it is."""

    def __init__(self, terminal: Any, started: bool) -> None:
        self.terminal, self.is_started, self.transient = terminal, started, False

    def stop(self) -> None:
        self.is_started = False
        self.terminal.write(f"<stopped, transient: {self.transient}>")

    def start(self, refresh: bool) -> None:
        self.is_started = True
        self.terminal.write(f"<started, refresh: {refresh}>")


@pytest.mark.parametrize("running", [True, False])
def test_a_rich_bar_pauses_meanwhile(monkeypatch: pytest.MonkeyPatch, running: bool, new_terminal: Any) -> None:
    terminal = make_terminal(monkeypatch, new_terminal)
    display = Display(terminal, running)
    trainer: Any = SimpleNamespace(progress_bar_callback=SimpleNamespace(progress=SimpleNamespace(live=display)))
    with progress_line(trainer).show("moving", 1):
        terminal.wait_for("moving |")
        assert not display.is_started
    assert display.is_started is running
    assert not display.transient
    if running:
        written = terminal.getvalue()
        assert written.startswith("<stopped, transient: True>")
        assert written.endswith("<started, refresh: True>")


def test_a_rich_bar_that_has_not_begun_is_left_alone(monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> None:
    terminal = make_terminal(monkeypatch, new_terminal)
    trainer: Any = SimpleNamespace(progress_bar_callback=SimpleNamespace(progress=None))
    with progress_line(trainer).show("moving", 1):
        terminal.wait_for("moving |")
