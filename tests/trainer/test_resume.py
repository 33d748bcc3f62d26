"""Training goes on from a checkpoint within an epoch, on any number of workers, as if nothing had happened."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

EPOCHS, BATCHES, SAVED = 4, 6, 15

IN_FLIGHT_TOLERANCE = 0.05
"""In flight the weights differ slightly: batches just before and after the checkpoint meet versions less old."""


def scheduled(model: Any, rate: float = 0.01) -> Any:
    """With all that a checkpoint must hold: buffers, optimizer state, a scheduler, a callback's state."""

    class Scheduled(model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(lr=rate)
            layers = list(self.net)
            self.net = nn.Sequential(layers[0], nn.BatchNorm1d(12), *layers[1:6], nn.BatchNorm1d(8), layers[6])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Scheduled


class Resumable:
    """A dataloader that knows where it is, as one that resumes within an epoch must."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.position % len(self), len(self)):
            self.position = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Dies(L.Callback):
    """Ends everything right after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise SystemExit("killed")


def straight(module: Any, strategy: Any, trainer: Any, loader: Any) -> dict[str, Any]:
    trainer(strategy, max_epochs=EPOCHS).fit(module, Resumable(loader(BATCHES)))
    return dict(module.state_dict())


def broken(make: Any, first: Any, second: Any, trainer: Any, loader: Any, folder: Path) -> dict[str, Any]:
    """Train with ``first`` until it dies in the third epoch, and go on with ``second``."""

    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(folder, every_n_train_steps=SAVED, save_top_k=-1)

    before = trainer(first, max_epochs=EPOCHS, callbacks=[saving(), Dies(SAVED + 2)], enable_checkpointing=True)
    with pytest.raises(SystemExit):
        before.fit(make(), Resumable(loader(BATCHES)))
    (path,) = folder.glob("*.ckpt")
    module = make()
    after = trainer(second, max_epochs=EPOCHS, callbacks=[saving()], enable_checkpointing=True)
    after.fit(module, Resumable(loader(BATCHES)), ckpt_path=path, weights_only=True)
    assert after.global_step == EPOCHS * BATCHES
    return dict(module.state_dict())


pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:The dirpath has changed",
    "ignore:Checkpoint directory .* exists and is not empty",
)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (2, 3), ("auto", 2), (2, "auto")])
def test_one_batch_in_flight_resumes_to_the_same_weights(
    first: Any, second: Any, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    def strategy(workers: Any) -> Any:
        return workers if workers == "auto" else pipeline(1, workers)

    def make() -> Any:
        return seeded(scheduled(model))

    whole = straight(make(), "auto", trainer, loader)
    parts = broken(make, strategy(first), strategy(second), trainer, loader, tmp_path)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (2, 3)])
def test_four_in_flight_resume_within_tolerance(
    first: int, second: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    def make() -> Any:
        return seeded(scheduled(model))

    whole = straight(make(), pipeline(4, 2), trainer, loader)
    parts = broken(make, pipeline(4, first), pipeline(4, second), trainer, loader, tmp_path)
    assert parts["net.1.num_batches_tracked"] == EPOCHS * BATCHES
    torch.testing.assert_close(parts, whole, rtol=0, atol=IN_FLIGHT_TOLERANCE)
    start = make().state_dict()
    moved = max(float((whole[name] - start[name]).abs().max()) for name in whole if name.startswith("net"))
    assert moved > 3 * IN_FLIGHT_TOLERANCE, "the tolerance is small against what was learnt"


@pytest.mark.parametrize("second", [1, 3, "auto"])
def test_statistics_count_no_batch_twice(
    second: Any, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any, tmp_path: Path
) -> None:
    """With a learning rate of 0 they depend on the batches alone, however many are in flight at the checkpoint."""

    def make() -> Any:
        return seeded(scheduled(model, rate=0.0))

    whole = straight(make(), "auto", trainer, loader)
    after = second if second == "auto" else pipeline(4, second)
    parts = broken(make, pipeline(4, 2), after, trainer, loader, tmp_path)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    assert {int(t) for name, t in parts.items() if name.endswith("tracked")} == {EPOCHS * BATCHES}


def test_gathering_holds_one_stages_state_at_a_time(
    seeded: Any, loader: Any, pipeline: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Any]] = []
    strategy = pipeline(1, 3)
    for worker in strategy._worker_places:
        original = worker.state

        def state(timeout: float, original: Any = original) -> Any:
            assert all(earlier() is None for earlier in held)
            result = original(timeout)
            held.append(weakref.ref(result))
            return result

        monkeypatch.setattr(worker, "state", state)
    trainer(strategy).fit(seeded(), loader(2))
    assert len(held) == 3
