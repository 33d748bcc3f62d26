"""What comes before a central node's first batch, over free or limited links."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from pacing import FREE, LIMITED, Pace

from lightning_accept import AccEPTStrategy


class Gates(L.Callback):
    """Paces what comes before the first batch: devices are measured, links probed, a plan made, weights moved.

    Args:
        pace: Asks for the links.
        begin: Called when the stages are in place.
    """

    def __init__(self, pace: Pace, begin: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        """What each of these took."""
        self._pace = pace
        self._begin = begin
        self._last = 0.0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Wait for what the strategy asks of its foresight: to measure, to plan, and to take note of a deployment."""
        assert isinstance(trainer.strategy, AccEPTStrategy)
        foresight = trainer.strategy.foresight
        self._last = time.perf_counter()
        _after(foresight, "measure", lambda: self._pass("measuring devices", LIMITED))
        _after(foresight, "plan", lambda: self._pass("probing links and planning", FREE))
        _after(foresight, "deployed", lambda: self._deployed(foresight))

    def _deployed(self, foresight: Any) -> None:
        for name in ("measure", "plan", "deployed"):
            delattr(foresight, name)  # the class's own again: what comes later is part of training
        self._pass("moving weights", LIMITED)
        self._begin()

    def _pass(self, what: str, links: str) -> None:
        now = time.perf_counter()
        self.seconds[what] = now - self._last
        self._pace.ask(links)
        self._last = time.perf_counter()


def _after(owner: Any, name: str, action: Callable[[], None]) -> None:
    """From now on, call ``action`` whenever this object's method ``name`` returns."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        action()
        return result

    setattr(owner, name, wrapped)
