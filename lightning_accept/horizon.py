"""How far Lightning's training loop is certain to go: the batches that may be begun before their turn."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer

from lightning_accept.pipeline.lookahead import Feed


class TrainingHorizon:
    """Looks ahead in the training loop from the batch in hand.

    Args:
        trainer: The trainer, in fit.
        sync_warmup_steps: Optimizer steps before which no batch is begun ahead of its turn.
    """

    def __init__(self, trainer: Trainer, sync_warmup_steps: int) -> None:
        self._trainer = trainer
        self._sync_warmup_steps = sync_warmup_steps
        self._min_steps = trainer.fit_loop.epoch_loop.min_steps

    def batches_ahead(self, feed: Feed | None) -> float:
        """Batches after the one in hand until the pipeline must be drained, all of which will be trained.

        The pipeline is drained before validation, at the end of the epoch and after the last step. Infinite where none
        of these is in sight.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if feed is None or trainer.global_step < self._sync_warmup_steps:
            return 0
        index = loop.batch_idx
        ahead: float = trainer.num_training_batches - 1 - index
        every = trainer.val_check_batch
        if every is not None and not math.isinf(every) and loop._should_check_val_epoch():
            position = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else index
            ahead = min(ahead, every - 1 - position % every)
        if trainer.max_steps != -1:
            left = trainer.max_steps - trainer.global_step
            ahead = min(ahead, self._batches_for(left, feed, ahead) - 1)
        if trainer.should_stop and self._epochs_met():
            # Lightning stops after an optimizer step, once min_steps are taken; begin nothing beyond that one.
            missing = self._batches_for(max(0, (self._min_steps or 0) - trainer.global_step), feed, ahead)
            ahead = min(ahead, self._until_update(feed, max(len(feed.started()), missing - 1)))
        return max(0, ahead)

    def updates(self, feed: Feed | None, offset: int) -> bool:
        """Whether the batch ``offset`` places after the one in hand ends with an optimizer step."""
        index = self._trainer.fit_loop.epoch_loop.batch_idx + offset
        if (index + 1) % self._trainer.accumulate_grad_batches == 0 or index + 1 == self._trainer.num_training_batches:
            return True
        return math.isinf(self._trainer.num_training_batches) and feed is not None and feed.following(offset) is None

    def hold(self, feed: Feed | None, ahead: int) -> None:
        """Keep Lightning from stopping early before the batch ``ahead`` places after the one in hand is trained."""
        loop = self._trainer.fit_loop.epoch_loop
        if ahead == 0:
            loop.min_steps = self._min_steps
            return
        planned = [self.updates(feed, offset) for offset in range(ahead + 1)]
        steps = self._trainer.global_step + sum(planned) + (not planned[-1])
        loop.min_steps = max(self._min_steps or 0, steps)

    def release(self) -> None:
        """Let Lightning stop whenever it wants."""
        self._trainer.fit_loop.epoch_loop.min_steps = self._min_steps

    def _batches_for(self, steps: int, feed: Feed, limit: float) -> int:
        """Batches, the one in hand included, until ``steps`` optimizer steps are taken, at most ``limit`` + 1."""
        if self._trainer.accumulate_grad_batches == 1:
            return steps
        count = 0
        while steps > 0 and count <= limit:
            steps -= self.updates(feed, count)
            count += 1
        return count

    def _epochs_met(self) -> bool:
        loop = self._trainer.fit_loop
        return not loop.min_epochs or self._trainer.current_epoch >= loop.min_epochs

    def _until_update(self, feed: Feed, offset: int) -> int:
        """The offset, at or after this one, of the first batch that ends with an optimizer step."""
        while not self.updates(feed, offset):
            offset += 1
        return offset
