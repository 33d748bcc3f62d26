"""BufferHistory: a stage's buffers without the batches that are still in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class BufferHistory:
    """Keeps what buffers held before each job in flight.

    A forward changes BatchNorm's statistics at once, while the weights change with the backward only. A state that is
    saved in between must leave the batches in flight out of both, for they are forwarded again when training goes on.

    Jobs are to end in the order in which they began.

    Args:
        buffers: The buffers that a forward overwrites, by name. Used as they are.
        shown: Tensors, by the same names, that always hold what :meth:`settled` returns. What somebody else writes into
            them while nothing is in flight, is taken over.
    """

    def __init__(self, buffers: Mapping[str, Tensor], shown: Mapping[str, Tensor] | None = None) -> None:
        self._buffers = dict(buffers)
        self._shown = dict(shown or {})
        self._before: dict[int, dict[str, Tensor]] = {}

    def settled(self) -> dict[str, Tensor]:
        """The buffers as of before the oldest job in flight; the buffers themselves if there is none."""
        return next(iter(self._before.values()), self._buffers)

    def begin(self, job: int) -> None:
        """A job is about to be forwarded."""
        self._look()
        with torch.inference_mode(False), torch.no_grad():
            self._before[job] = {name: buffer.clone() for name, buffer in self._buffers.items()}

    def end(self, job: int) -> None:
        """A job has been backwarded, or its forward is all that there will be of it."""
        self._before.pop(job, None)
        self._show()

    def undo(self, job: int) -> None:
        """Make a job undone, the oldest in flight, and with it all that were forwarded after it."""
        before = self._before.pop(job, None)
        if before is not None:
            _copy(before, self._buffers)
            self._before = dict.fromkeys(self._before, before)
        self._show()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The stage runs without a backward to come."""
        self._look()
        yield
        self._show()

    def _look(self) -> None:
        if not self._before:
            _copy(self._shown, self._buffers)

    def _show(self) -> None:
        if self._shown:
            _copy(self.settled(), self._shown)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
