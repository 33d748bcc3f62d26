"""When a central node has trained enough: a steady state was seen, or a test accuracy reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
from classifier import accuracy
from pacing import FREE, LIMITED, Pace
from torch import Tensor, nn

from lightning_accept import AccEPTStrategy

WARM_UP = 4
"""Batches that do not count, besides as many as are in flight."""


class UntilSteady(L.Callback):
    """Stops once enough batches of the steady state have ended.

    At least three times as many as are in flight; beyond that, ``batches`` or as many as end within ``seconds``.

    Args:
        times: When batches ended, in seconds; somebody else writes them down, before this callback's turn.
        pace: Asks for free links when the drain begins.
        batches: Batches that are enough.
        seconds: Seconds of the steady state that are enough.
        note: Called when it is enough, before the drain.
    """

    def __init__(
        self, times: list[float], pace: Pace, batches: int, seconds: float, note: Callable[[L.Trainer], None]
    ) -> None:
        self.range: tuple[int, int] | None = None
        """First batch that counts, and the one after the last, as indices into ``times``."""
        self._times = times
        self._pace = pace
        self._batches = batches
        self._seconds = seconds
        self._note = note

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop if that was enough."""
        if self.range is not None:
            return
        assert isinstance(trainer.strategy, AccEPTStrategy)
        self.range = enough(self._times, trainer.strategy.schedule.in_flight, self._batches, self._seconds)
        if self.range is not None:
            self._note(trainer)
            trainer.should_stop = True
            self._pace.ask(FREE)


def enough(times: list[float], in_flight: int, batches: int, seconds: float) -> tuple[int, int] | None:
    """The batches that count if they are enough by now, else None; see :class:`UntilSteady`."""
    first = in_flight + WARM_UP
    count = len(times) - first
    if count < 3 * in_flight or (count < batches and times[-1] - times[first] < seconds):
        return None
    return first, len(times)


class UntilAccurate(L.Callback):
    """Looks at the test accuracy after every epoch, and stops once it is high enough, or after a time limit.

    The clock stands still, and links are free, while weights are gathered and tested: the pipeline is drained then
    anyway.

    Args:
        pace: Asks for free and limited links.
        net: Another instance of the network that is trained.
        images: Test inputs.
        labels: Their labels.
        target: Accuracy from which on it is enough.
        limit: Seconds of training that are enough.
    """

    def __init__(self, pace: Pace, net: nn.Module, images: Tensor, labels: Tensor, target: float, limit: float) -> None:
        self.curve: list[dict[str, float]] = []
        """Seconds of training, batches and accuracy after every epoch."""
        self._pace = pace
        self._net = net
        self._images, self._labels = images, labels
        self._target, self._limit = target, limit
        self._seconds, self._since = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Test, and stop if that was enough."""
        self._seconds += time.perf_counter() - self._since
        self._pace.ask(FREE)
        assert isinstance(trainer.strategy, AccEPTStrategy)
        state = trainer.strategy.lightning_module_state_dict()
        self._net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
        reached = accuracy(self._net, self._images, self._labels)
        self.curve.append({"seconds": self._seconds, "batches": trainer.global_step, "accuracy": reached})
        print(f"accuracy {reached:.4f} after {trainer.global_step} batches, {self._seconds:.1f} s", flush=True)
        if reached >= self._target or self._seconds >= self._limit:
            trainer.should_stop = True
            return
        self._pace.ask(LIMITED)
        self.begin()
