"""The look-ahead loader: batches can be begun before Lightning's loop asks for them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning_accept.pipeline.suspended import SuspendedStep
from lightning_accept.pipeline.ticket import Ticket

_LOOPS_ITERATE_IN = "lightning.pytorch.utilities.combined_loader"
"""The module in which Lightning's loops begin a pass over a dataloader; there is no hook for that."""


class Handle:
    """What Lightning's loop is given in place of a batch, until the strategy's transfer hook hands out the batch.

    Attributes:
        feed: Where it comes from.
        raw: The batch as the dataloader yielded it.
        batch: The batch after the transfer hooks.
        opened: Whether the transfer hooks have run; they run once.
        step: The user's step, once it was started.
        ticket: The training batch in the pipeline, once its stage-0 forward is done.
        evaluation: The number of the evaluation batch in the pipeline, likewise.
        updates: Whether the batch is expected to end with an optimizer step.
        state: State of a stateful dataloader after this batch.
    """

    def __init__(self, feed: Feed | None, raw: Any, state: Any = None) -> None:
        self.feed = feed
        self.raw = raw
        self.batch: Any = None
        self.opened = False
        self.step: SuspendedStep | None = None
        self.ticket: Ticket | None = None
        self.evaluation: int | None = None
        self.updates = True
        self.state = state

    @property
    def begun(self) -> bool:
        """Whether the pipeline, or at least the user's step, has done all it can before the batch's turn."""
        if self.step is None:
            return False
        return self.ticket is not None or self.evaluation is not None or self.step.finished


class Feed:
    """One pass over a dataloader, readable ahead of what Lightning has asked for."""

    def __init__(self, loader: Any) -> None:
        self.exhausted = False
        self.taken = 0
        """Batches taken in hand so far."""
        self.state: Any = None
        """State of a stateful dataloader after the batch in hand."""
        self._loader = loader
        self._iterator: Iterator[Any] = iter(loader)
        self._queue: deque[Handle] = deque()  # fetched, and not yet taken in hand
        self._given = 0  # how many of these Lightning has been given: it fetches one ahead where there is no length

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Handle:
        handle = self.following(self._given)
        if handle is None:
            raise StopIteration
        self._given += 1
        return handle

    def following(self, position: int) -> Handle | None:
        """The batch ``position`` places after the next one to be taken in hand; None past the end."""
        while len(self._queue) <= position:
            if not self._fetch():
                return None
        return self._queue[position]

    def take(self, handle: Handle) -> None:
        """Take a batch in hand: those up to and with it are no longer ahead."""
        while handle in self._queue:
            first = self._queue.popleft()
            self._given -= 1
            self.taken += 1
            self.state = first.state

    def started(self) -> list[SuspendedStep]:
        """Steps started for batches that have not been taken in hand."""
        return [handle.step for handle in self._queue if handle.step is not None]

    def _fetch(self) -> bool:
        if self.exhausted:
            return False
        try:
            raw = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            return False
        state = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        self._queue.append(Handle(self, raw, state))
        return True


class LookAheadLoader:
    """A dataloader whose batches come to Lightning's loops as :class:`Handle`.

    In all else, also for users who iterate over ``trainer.train_dataloader``, it is the dataloader that it wraps.

    Args:
        loader: The dataloader.
        on_feed: Told of every pass that begins.
    """

    def __init__(self, loader: Any, on_feed: Callable[[Feed], None]) -> None:
        vars(self).update(_wrapped=loader, _on_feed=on_feed, _feed=None)

    def __iter__(self) -> Iterator[Any]:
        if sys._getframe(1).f_globals.get("__name__") != _LOOPS_ITERATE_IN:
            return iter(self._wrapped)
        feed = vars(self)["_feed"] = Feed(self._wrapped)
        self._on_feed(feed)
        return feed

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(vars(self)["_wrapped"], name)
        return self._state_in_hand if name == "state_dict" else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def _state_in_hand(self) -> Any:
        """The dataloader's state after the batch in hand, however far it was read ahead."""
        if self._feed is not None and self._feed.state is not None:
            return self._feed.state
        return self._wrapped.state_dict()


def begin_ahead(handle: Handle, most: int, begin: Callable[[Handle, int], bool]) -> bool:
    """Take a batch in hand and begin it and those that follow it.

    Args:
        handle: The batch that Lightning's loop has come to.
        most: How many batches beyond it may be begun.
        begin: Begins a batch, given how many places it is ahead; False if it cannot be begun before its turn.

    Returns:
        Whether all of ``most`` are begun; False where the dataloader ended or a batch must wait for its turn.
    """
    if handle.feed is not None:
        handle.feed.take(handle)
    if not handle.begun:
        begin(handle, 0)
    for ahead in range(most):
        following = handle.feed.following(ahead) if handle.feed is not None else None
        if following is None or (not following.begun and not begin(following, ahead + 1)):
            return False
    return True
