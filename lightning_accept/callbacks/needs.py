"""What callbacks need of their arguments and of the trainer, and what they say if it is not so."""

from __future__ import annotations

import logging

from lightning.pytorch import Trainer

from lightning_accept.strategy import AccEPTStrategy

log = logging.getLogger("lightning_accept")


def check_interval(every_n_batches: int) -> int:
    """The interval as it is.

    Raises:
        ValueError: If it is below 1.
    """
    if every_n_batches < 1:
        raise ValueError(f"every_n_batches={every_n_batches}: give a number from 1")
    return every_n_batches


def accept_strategy(trainer: Trainer, callback: str) -> AccEPTStrategy | None:
    """The trainer's strategy; None, with a warning, if it is another one than ``AccEPTStrategy``."""
    strategy = trainer.strategy
    if isinstance(strategy, AccEPTStrategy):
        return strategy
    log.warning("%s does nothing: it needs AccEPTStrategy, not %s", callback, type(strategy).__name__)
    return None


def strategy_with_foresight(trainer: Trainer, callback: str) -> AccEPTStrategy | None:
    """The same, but None, with a line in the log, also if no device is measured."""
    strategy = accept_strategy(trainer, callback)
    if strategy is not None and strategy.foresight is None:
        log.info("%s does nothing, since no device is measured; choose AccEPTStrategy(latency=...)", callback)
        return None
    return strategy
