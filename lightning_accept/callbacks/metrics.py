"""Figures for whatever loggers the trainer has."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer


def log_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Hand ``metrics`` to all loggers, at the step at which Lightning logs its own."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
