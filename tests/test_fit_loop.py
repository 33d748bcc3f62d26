"""Lightning's ways to begin and end training: every batch begun is trained, none is lost and none comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Numbers(Dataset[Tensor]):
    """Samples that carry their own number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.full((4,), float(index))


class Stream(IterableDataset[Tensor]):
    """The same without a length."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            self.read.append(index)
            yield torch.full((4,), float(index))


class Model(L.LightningModule):
    """Writes down everything that happens to every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: dict[str, list[int]] = {
            name: [] for name in ("before", "after", "begun", "resumed", "indices", "ended", "validated")
        }

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.note("before", batch)
        return batch + 0.25

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.note("after", batch)
        return batch + 0.25

    def note(self, what: str, batch: Tensor) -> None:
        if self.trainer.training:
            self.seen[what].append(int(batch[0, 0]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert float(batch[0, 0]) % 1 == 0.5, "both hooks have run, once"
        self.note("begun", batch)
        self.log("first", float(int(batch[0, 0])))
        loss = self.net(batch * 1e-3).square().mean()
        self.note("resumed", batch)
        self.seen["indices"].append(batch_idx)
        self.log("second", float(int(batch[0, 0])))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        number = int(batch[0, 0])
        self.seen["ended"].append(number)
        # What was logged before and after the pipelined call belongs to the batch in hand.
        assert self.trainer.callback_metrics["first"] == number
        assert self.trainer.callback_metrics["second"] == number

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)
        if not self.trainer.sanity_checking:
            self.seen["validated"].append(int(batch[0, 0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(dataset: Any, *, in_flight: Any = 4, callbacks: Any = (), validation: Any = None, **arguments: Any) -> Model:
    module = Model()
    trainer = L.Trainer(
        **{"max_epochs": 1, "logger": False, **arguments},
        strategy=AccEPTStrategy(MemoryCluster(2, build_stage).workers, in_flight=in_flight),
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    validation_loader = None if validation is None else DataLoader(validation, 1)
    trainer.fit(module, DataLoader(dataset, 1), validation_loader)
    return module


def assert_trained(module: Model, numbers: list[int]) -> None:
    for what in ("before", "after", "begun", "resumed", "ended"):
        assert module.seen[what] == numbers, what


def flow(epochs: int, batches: int) -> list[int]:
    return list(range(batches)) * epochs


@pytest.mark.parametrize("in_flight", [1, 2, 4, 7])
@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_whole_epochs(make: Any, count: int, in_flight: int) -> None:
    module = fit(make(count), in_flight=in_flight, max_epochs=2)
    assert_trained(module, flow(2, count))
    assert module.seen["indices"] == flow(2, count)


@pytest.mark.parametrize("make", [Numbers, Stream])
def test_limit_train_batches_reads_no_further(make: Any) -> None:
    dataset = make(20)
    assert_trained(fit(dataset, limit_train_batches=5), flow(1, 5))
    assert dataset.read == flow(1, 5)


def test_limit_train_batches_as_a_fraction() -> None:
    assert_trained(fit(Numbers(20), limit_train_batches=0.3), flow(1, 6))


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_max_steps_in_the_middle_of_an_epoch(make: Any, accumulate: int) -> None:
    module = fit(make(20), max_steps=4, max_epochs=-1, accumulate_grad_batches=accumulate)
    assert_trained(module, flow(1, 4 * accumulate))


def test_max_steps_over_several_epochs() -> None:
    assert_trained(fit(Numbers(5), max_steps=12, max_epochs=-1), [*flow(2, 5), 0, 1])


def test_overfit_batches() -> None:
    assert_trained(fit(Numbers(20), overfit_batches=2, max_epochs=3), flow(3, 2))


def test_fast_dev_run() -> None:
    module = fit(Numbers(20), fast_dev_run=3, validation=Numbers(9))
    assert_trained(module, flow(1, 3))
    assert module.seen["validated"] == flow(1, 3)


class StopAt(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.should_stop = True


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_stop_in_the_middle_of_an_epoch_trains_what_is_begun(make: Any, accumulate: int) -> None:
    module = fit(make(30), callbacks=[StopAt(6)], max_epochs=3, accumulate_grad_batches=accumulate)
    begun = len(module.seen["begun"])
    assert 7 <= begun < 14
    assert begun % accumulate == 0
    assert_trained(module, flow(1, begun))


def test_min_steps_of_the_user_still_count() -> None:
    module = fit(Numbers(30), callbacks=[StopAt(2)], min_steps=12, min_epochs=0)
    begun = len(module.seen["begun"])
    assert 12 <= begun < 18
    assert_trained(module, flow(1, begun))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_validation_within_an_epoch(in_flight: int) -> None:
    module = fit(Numbers(10), validation=Numbers(6), val_check_interval=4, in_flight=in_flight, max_epochs=2)
    assert_trained(module, flow(2, 10))
    assert module.seen["validated"] == flow(4, 6)


def test_limit_val_batches_reads_no_further() -> None:
    validation = Numbers(20)
    module = fit(Numbers(3), validation=validation, limit_val_batches=4, num_sanity_val_steps=2)
    assert module.seen["validated"] == flow(1, 4)
    assert validation.read == [*flow(1, 2), *flow(1, 4)]


def test_a_step_that_returns_none_skips_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning warns once in a process, so not if another test came first.
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())

    class Skipping(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 3 == 1 else loss

    module = Skipping()
    trainer = L.Trainer(
        max_epochs=1,
        strategy=AccEPTStrategy(MemoryCluster(2, build_stage).workers, in_flight=3),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer.fit(module, DataLoader(Numbers(8), 1))
    assert_trained(module, flow(1, 8))
