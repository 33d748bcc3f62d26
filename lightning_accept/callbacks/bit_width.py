"""BitWidthScheduler: more bits for activations, fewer for gradients, as the learning rate falls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau, StepLR
from typing_extensions import override

from lightning_accept.callbacks.needs import accept_strategy
from lightning_accept.strategy import AccEPTStrategy

log = logging.getLogger("lightning_accept")


class BitWidthScheduler(Callback):
    """Changes the codecs' bit widths as the learning rate falls (AccEPT, arXiv 2311.05827).

    One rule: a step each time the learning rate has fallen to ``fraction`` of its peak since the last step, or below;
    the peak then starts anew from the rate of that moment. A rise is never a step, and a single fall is never more than
    one. Schedules that come down in stairs take a step at *every* fall, however small, as in the paper: these are
    StepLR (with a ``step_size`` of at least 2), MultiStepLR and ReduceLROnPlateau. All others (cosine, OneCycle,
    warm-up, exponential, LambdaLR, SequentialLR, ...) may move with every batch, and ``fraction`` decides; with
    ``fraction=1`` every fall counts there too. Without a scheduler the optimizer's own rate is watched by that rule.

    The rate is the largest of all param groups of the first scheduler's optimizer, read before every batch. A step
    changes the activations of the batches begun from then on, and the gradients of the batch in hand and those after
    it: the same batch on every link, also with batches in flight. Every width holds until the next step, the last one
    for good. The state is part of the checkpoint; a resumed training goes on with the widths that it had.

    Codecs without a bit width stay as they are. Under any other strategy this callback does nothing, and says so.

    Args:
        forward: Bits per activation: at the start, after the first step, and so on.
        backward: Bits per gradient, likewise.
        fraction: Part of the peak rate at which a step is due, above 0 and at most 1.

    Raises:
        ValueError: If an argument is out of range. When training starts: if a codec does not take one of the widths.
    """

    def __init__(
        self, forward: Sequence[int] = (2, 3, 4), backward: Sequence[int] = (8, 4), fraction: float = 0.5
    ) -> None:
        for name, widths in (("forward", forward), ("backward", backward)):
            if not widths or any(type(width) is not int or width < 1 for width in widths):
                raise ValueError(f"{name}={widths!r}: give at least one bit width, each a number from 1")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction!r}: give a number above 0 and at most 1")
        self.forward = tuple(forward)
        self.backward = tuple(backward)
        self.fraction = fraction
        self.steps = 0
        """Steps taken so far; it stops growing when both directions are at their last width."""
        self._peak: float | None = None
        self._strategy: AccEPTStrategy | None = None

    @property
    def bits(self) -> dict[str, int]:
        """Bit widths of this moment, ``forward`` and ``backward``."""
        return self._widths(self.steps)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # before a checkpoint is loaded
            self.steps, self._peak = 0, None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy = strategy = accept_strategy(trainer, "BitWidthScheduler")
        if strategy is None:
            return
        # From the last width to the one in force: one that a codec refuses is refused now, not hours later.
        for steps in range(self._last_step, self.steps, -1):
            strategy.set_bits(**self._widths(steps))
        strategy.set_bits(**self.bits)
        log.info("bit widths: %d forward, %d backward", self.bits["forward"], self.bits["backward"])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rate = _learning_rate(trainer)
        if self._strategy is None or rate is None:
            return
        if self._peak is None or rate >= self._peak:
            self._peak = rate
        elif rate <= self._peak * (1.0 if _in_stairs(trainer) else self.fraction):
            before, peak = self.bits, self._peak
            self._peak = rate
            self.steps = min(self.steps + 1, self._last_step)
            if self.bits != before:
                self._strategy.set_bits(**self.bits)
                changes = ", ".join(f"{before[name]} -> {bits} {name}" for name, bits in self.bits.items())
                log.info(
                    "bit widths: %s, from batch %d of epoch %d on; the learning rate fell from %.4g to %.4g",
                    changes,
                    batch_idx,
                    trainer.current_epoch,
                    peak,
                    rate,
                )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._strategy = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "peak": self._peak}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = min(state_dict["steps"], self._last_step)
        self._peak = state_dict["peak"]

    @property
    def _last_step(self) -> int:
        return max(len(self.forward), len(self.backward)) - 1

    def _widths(self, steps: int) -> dict[str, int]:
        return {
            "forward": self.forward[min(steps, len(self.forward) - 1)],
            "backward": self.backward[min(steps, len(self.backward) - 1)],
        }


def _learning_rate(trainer: Trainer) -> float | None:
    """The largest rate of all param groups; None where nothing is optimized."""
    optimizer: Optimizer | None = trainer.optimizers[0] if trainer.optimizers else None
    if trainer.lr_scheduler_configs:
        optimizer = getattr(trainer.lr_scheduler_configs[0].scheduler, "optimizer", optimizer)
    return None if optimizer is None else max(float(group["lr"]) for group in optimizer.param_groups)


def _in_stairs(trainer: Trainer) -> bool:
    """Whether the schedule keeps the rate for a while between two changes."""
    if not trainer.lr_scheduler_configs:
        return False
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    if isinstance(scheduler, StepLR):
        return scheduler.step_size > 1
    return isinstance(scheduler, (MultiStepLR, ReduceLROnPlateau))
