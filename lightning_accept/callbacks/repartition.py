"""Repartition: moves layers between devices while training, when that pays."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_accept.callbacks.metrics import log_metrics
from lightning_accept.callbacks.needs import check_interval, strategy_with_foresight
from lightning_accept.partition.forecast import Forecast
from lightning_accept.partition.plan import PlanError
from lightning_accept.pipeline.foresight import Foresight
from lightning_accept.pipeline.moves import MoveReport
from lightning_accept.strategy import AccEPTStrategy

log = logging.getLogger("lightning_accept")


class Repartition(Callback):
    """Makes a new plan while training, and moves layers when the gain over the rest of the run exceeds the cost.

    It looks every ``every_n_batches`` batches, and as soon as :class:`PredictorFeedback` has seen a device or a link
    change. Without that callback nothing is learnt while training, and there is no reason to move. For a move the
    pipeline is drained; weights, buffers and optimizer state of just the layers that change hands travel, from worker
    to worker.

    Args:
        every_n_batches: Batches between two plans.
        min_gain: Least part of the time per batch that a move must save.
        cooldown: Batches after a move in which there is no other.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, every_n_batches: int = 50, min_gain: float = 0.1, cooldown: int = 100) -> None:
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain={min_gain}: give a number from 0 to below 1, such as 0.1 for a tenth")
        if cooldown < 0:
            raise ValueError(f"cooldown={cooldown}: give a number of batches from 0")
        self.every_n_batches = check_interval(every_n_batches)
        self.min_gain = min_gain
        self.cooldown = cooldown
        self.moves = 0
        """Repartitions in this fit."""
        self._batches = 0
        self._quiet_until = 0
        self._moving = False
        self._strategy: AccEPTStrategy | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.moves = self._batches = self._quiet_until = 0
        self._moving = False
        self._strategy = strategy_with_foresight(trainer, "Repartition")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        foresight = None if self._strategy is None else self._strategy.foresight
        if foresight is None or foresight.forecast is None or self._moving or self._batches < self._quiet_until:
            return
        if foresight.stale or self._batches % self.every_n_batches == 0:
            foresight.stale = False
            self._consider(trainer, foresight, foresight.forecast)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._strategy = None

    def _consider(self, trainer: Trainer, foresight: Foresight, old: Forecast) -> None:
        period = foresight.period(old)
        try:
            if foresight.least_period() > (1 - self.min_gain) * period:
                log_metrics(trainer, {"accept/predicted_period": period})
                return
            new = foresight.plan()
        except PlanError as error:
            log.warning("repartition: there is no other plan: %s", error)
            return
        log_metrics(trainer, {"accept/predicted_period": period, "accept/best_period": new.period})
        same = (new.starts, new.workers, new.schedule) == (old.starts, old.workers, old.schedule)
        if same or new.period > (1 - self.min_gain) * period:
            return
        saved, cost = (period - new.period) * _batches_left(trainer), foresight.moving_seconds(new)
        if saved <= cost:
            log.info(
                "repartition: %.3g s instead of %.3g s per batch are possible, but not worth the move of about %.3g s"
                " at this stage of the run",
                new.period,
                period,
                cost,
            )
            return
        self._moving = True  # until the pipeline is drained, which can take more batches than the cooldown
        assert self._strategy is not None
        self._strategy.repartition(new, lambda report: self._moved(trainer, foresight, new, period, report))

    def _moved(self, trainer: Trainer, foresight: Foresight, new: Forecast, period: float, report: MoveReport) -> None:
        self.moves += 1
        self._moving = False
        self._quiet_until = self._batches + self.cooldown
        log.info(
            "repartition: moved %d layers (%d bytes) in %.3g s; %.3g s per batch expected instead of %.3g s; %s",
            report.layers,
            report.nbytes,
            report.seconds,
            new.period,
            period,
            new.describe(foresight.layers),
        )
        log_metrics(trainer, {"accept/repartitions": float(self.moves)})


def _batches_left(trainer: Trainer) -> float:
    """Training batches that are still to come, as far as the trainer knows."""
    total = trainer.estimated_stepping_batches
    if math.isinf(total):
        return math.inf
    return max(0.0, (total - trainer.global_step) * trainer.accumulate_grad_batches)
