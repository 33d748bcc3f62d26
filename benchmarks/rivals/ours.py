"""The central node of our own pipeline; its workers are started by the ordinary command line."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
from methods import METHODS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_accept import AccEPTStrategy

from .job import Job, Progress


class Model(L.LightningModule):
    """The network, trained as all others do.

    Args:
        job: The job.
        progress: Where accuracies go.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        super().__init__()
        self.net = job.net()
        self._job = job
        self._progress = progress
        self._right = self._seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count what is right."""
        # Not in one line with the sum: other batches' steps run while this one waits for the net.
        right = int((self.net(batch[0]).argmax(1) == batch[1]).sum())
        self._right += right
        self._seen += len(batch[1])

    def on_validation_epoch_end(self) -> None:
        """Tell the accuracy."""
        self._progress.told(self._right / self._seen)
        self._right = self._seen = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return self._job.optimizer(self.parameters())


class Watch(L.Callback):
    """Prints every batch, and ``plan JSON`` after the first.

    Args:
        progress: Prints batches.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """A batch has ended."""
        if self._progress.count == 0:
            print(f"plan {json.dumps(_describe(trainer))}", flush=True)
        self._progress.batch()


class Order(Sampler[list[int]]):
    """The batches of all epochs in the order that every method has.

    Args:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self._orders = job.orders()
        self._steps = job.steps_per_epoch

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        for order in islice(self._orders, self._steps):
            yield order.tolist()


def train(job: Job, options: Namespace) -> None:
    """Train through the workers."""
    progress = Progress(job)
    x, x_test, y, y_test = job.parts
    method = METHODS[options.our_method]
    settings = method.strategy_arguments("digits", options.predictor)
    if options.starts is not None:
        settings.update(latency="flops", partition=options.starts)
    if options.in_flight is not None:
        settings.update(in_flight=options.in_flight)
    settings.update(sync_warmup_steps=options.sync, scale_lr_by_staleness=options.scale_lr)
    strategy = AccEPTStrategy(options.workers, **settings)
    trainer = L.Trainer(
        max_epochs=-(-job.total // job.steps_per_epoch),
        strategy=strategy,
        accelerator="cpu",
        callbacks=[Watch(progress), *method.callbacks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = DataLoader(TensorDataset(x, y), batch_sampler=Order(job))
    test = DataLoader(TensorDataset(x_test, y_test), 250) if job.learns else None
    trainer.fit(Model(job, progress), data, test)


def _describe(trainer: L.Trainer) -> dict[str, Any]:
    assert isinstance(trainer.strategy, AccEPTStrategy)
    foresight = trainer.strategy.foresight
    if foresight is None or foresight.forecast is None:
        return {}
    forecast, schedule = foresight.forecast, foresight.forecast.schedule
    return {
        "starts": forecast.starts,
        "workers": forecast.workers,
        "in_flight": schedule.in_flight,
        "windows": schedule.windows,
        "backward_lag": schedule.backward_lag,
        "period": forecast.period,
        "bound": forecast.plan.period,
        "bottleneck": forecast.plan.bottleneck,
    }
