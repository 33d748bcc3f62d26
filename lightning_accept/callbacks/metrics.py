"""Figures for whatever loggers the trainer has."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer


def current_step(trainer: Trainer) -> int:
    """The step at which Lightning logs its own metrics."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], step: int | None = None) -> None:
    """Hand ``metrics`` to all loggers; at the current step, if none is given."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=current_step(trainer) if step is None else step)
