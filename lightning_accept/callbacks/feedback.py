"""PredictorFeedback: training itself tells how fast the devices are."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_accept.callbacks.metrics import log_metrics
from lightning_accept.callbacks.needs import check_interval, strategy_with_foresight
from lightning_accept.pipeline.foresight import Foresight
from lightning_accept.pipeline.watch import Change, StageMedian
from lightning_accept.strategy import AccEPTStrategy

log = logging.getLogger("lightning_accept")


class PredictorFeedback(Callback):
    """Keeps what is known of devices and links up to date (dynamic prediction of AccEPT, arXiv 2311.05827).

    Every stage's time and every link's speed come back with the gradients. Every ``every_n_batches`` batches their
    medians are compared with what is expected. What is within ``threshold`` makes the latency model learn; a stage
    beyond it has changed, and its device is measured again, the pipeline being drained for that. :class:`Repartition`
    makes a new plan of it.

    It logs, for every stage, the seconds per job that were predicted and measured, as ``accept/stage_1/...``.

    Needs ``AccEPTStrategy(latency=...)`` other than ``flops``; otherwise it says so and does nothing.

    Args:
        every_n_batches: Batches between two looks.
        threshold: Relative difference from which a device counts as changed.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, every_n_batches: int = 20, threshold: float = 0.25) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold={threshold}: give a number above 0, such as 0.25 for a quarter")
        self.every_n_batches = check_interval(every_n_batches)
        self.threshold = threshold
        self._batches = 0
        self._strategy: AccEPTStrategy | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._strategy = strategy_with_foresight(trainer, "PredictorFeedback")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        foresight = None if self._strategy is None else self._strategy.foresight
        if foresight is None or foresight.forecast is None or self._batches % self.every_n_batches:
            return
        assert self._strategy is not None
        predicted = {stage: foresight.expected(stage) for stage in range(len(foresight.forecast.plan.stages))}
        medians, changes = foresight.look(self.threshold)
        log_metrics(trainer, _metrics(foresight, predicted, medians))
        if changes:
            self._report(foresight, changes)
            self._strategy.remeasure([change.stage for change in changes])

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._strategy = None

    def _report(self, foresight: Foresight, changes: list[Change]) -> None:
        assert foresight.forecast is not None
        for change in changes:
            name = foresight.forecast.plan.stages[change.stage].name
            log.info(
                "feedback: stage %d (%s) takes %.3g s instead of %.3g s, %.2f times as long; measuring it again",
                change.stage,
                name,
                change.measured,
                change.expected,
                change.ratio,
            )


def _metrics(foresight: Foresight, predicted: dict[int, float], medians: dict[int, StageMedian]) -> dict[str, float]:
    """What a logger gets: seconds per job."""
    metrics: dict[str, float] = {}
    for stage, median in medians.items():
        metrics[f"accept/stage_{stage}/predicted_seconds"] = predicted[stage]
        metrics[f"accept/stage_{stage}/measured_seconds"] = median.seconds
    for (source, target), speed in foresight.speeds.known.items():
        if speed.bandwidth != float("inf"):
            metrics[f"accept/link_{source}_{target}/bits_per_second"] = speed.bandwidth
    return metrics
