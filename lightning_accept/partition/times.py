"""How long a device takes for a sub-model: a contiguous run of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]


class SubModelTimes(ABC):
    """Seconds of forward and backward of the layers ``first`` to ``stop - 1`` on one device, for one batch."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of layers of the whole model."""

    @abstractmethod
    def forward(self, first: int, stop: int) -> float:
        """Seconds of the forward; infinity where the device cannot run that sub-model."""

    @abstractmethod
    def backward(self, first: int, stop: int) -> float:
        """Seconds of the backward; infinity where the device cannot run that sub-model."""

    @abstractmethod
    def table(self) -> Floats:
        """Forward plus backward of all sub-models, ``[layers + 1, layers + 1]``, at ``[first, stop]``.

        Zero on the diagonal, infinity below it and where the device cannot run the sub-model. A new array, which the
        caller may change.
        """

    @abstractmethod
    def row(self, first: int) -> Floats:
        """The row of :meth:`table` for one first layer, ``[layers + 1]``, a new array."""


class AdditiveTimes(SubModelTimes):
    """A sub-model takes the sum of its layers' times: O(layers) of memory, for models with many layers.

    Args:
        forward: Seconds of each layer's forward, ``[layers]``, finite.
        backward: Seconds of each layer's backward, ``[layers]``, finite; None if ``forward`` holds both together.
    """

    def __init__(self, forward: Sequence[float], backward: Sequence[float] | None = None) -> None:
        self._forward = _prefix("forward", forward)
        self._backward = np.zeros_like(self._forward) if backward is None else _prefix("backward", backward)
        if len(self._forward) != len(self._backward):
            raise ValueError(
                f"forward times for {len(self._forward) - 1} layers but backward times for {len(self._backward) - 1}"
            )
        self._total = self._forward + self._backward

    @property
    def layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self._total) - 1

    def forward(self, first: int, stop: int) -> float:
        """Seconds of the forward."""
        return float(self._forward[stop] - self._forward[first])

    def backward(self, first: int, stop: int) -> float:
        """Seconds of the backward."""
        return float(self._backward[stop] - self._backward[first])

    def table(self) -> Floats:
        """Forward plus backward of all sub-models."""
        return _upper(self._total[None, :] - self._total[:, None])

    def row(self, first: int) -> Floats:
        """Forward plus backward from ``first`` on."""
        row: Floats = self._total - self._total[first]
        row[:first] = np.inf
        return row


class TableTimes(SubModelTimes):
    """Every sub-model has its own time, as a predictor or a measurement gives it: O(layers^2) of memory.

    Args:
        forward: Seconds of the forwards, ``[layers + 1, layers + 1]``, at ``[first, stop]``; only the part above the
            diagonal is read. Infinity marks a sub-model that the device cannot run.
        backward: The same for the backwards; None if ``forward`` holds both together.
    """

    def __init__(self, forward: ArrayLike, backward: ArrayLike | None = None) -> None:
        self._forward = _square("forward", forward)
        self._backward = _upper(np.zeros_like(self._forward)) if backward is None else _square("backward", backward)
        if self._forward.shape != self._backward.shape:
            raise ValueError(
                f"forward times have shape {self._forward.shape} but backward times {self._backward.shape}"
            )

    @classmethod
    def from_function(cls, layers: int, seconds: Callable[[int, int], tuple[float, float]]) -> TableTimes:
        """Ask ``seconds(first, stop)`` for the forward and backward time of every sub-model."""
        tables = np.full((2, layers + 1, layers + 1), np.inf)
        for first in range(layers):
            for stop in range(first + 1, layers + 1):
                tables[:, first, stop] = seconds(first, stop)
        return cls(tables[0], tables[1])

    @property
    def layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self._forward) - 1

    def forward(self, first: int, stop: int) -> float:
        """Seconds of the forward; infinity where the device cannot run that sub-model."""
        return float(self._forward[first, stop])

    def backward(self, first: int, stop: int) -> float:
        """Seconds of the backward; infinity where the device cannot run that sub-model."""
        return float(self._backward[first, stop])

    def table(self) -> Floats:
        """Forward plus backward of all sub-models."""
        return np.array(self._total)

    def row(self, first: int) -> Floats:
        """Forward plus backward from ``first`` on."""
        return np.array(self._total[first])

    @cached_property
    def _total(self) -> Floats:
        return self._forward + self._backward


class ScaledTimes(SubModelTimes):
    """Other times, multiplied.

    Args:
        times: The other times.
        factor: One factor for all sub-models, or one for each, ``[layers + 1, layers + 1]`` at ``[first, stop]``. Above
            0 all of them.
    """

    def __init__(self, times: SubModelTimes, factor: ArrayLike) -> None:
        self._times = times
        self._factor = np.broadcast_to(np.asarray(factor, dtype=np.float64), (times.layers + 1, times.layers + 1))

    @property
    def layers(self) -> int:
        """Number of layers of the whole model."""
        return self._times.layers

    def forward(self, first: int, stop: int) -> float:
        """Seconds of the forward."""
        return float(self._factor[first, stop] * self._times.forward(first, stop))

    def backward(self, first: int, stop: int) -> float:
        """Seconds of the backward."""
        return float(self._factor[first, stop] * self._times.backward(first, stop))

    def table(self) -> Floats:
        """Forward plus backward of all sub-models."""
        table: Floats = self._times.table() * self._factor
        return table

    def row(self, first: int) -> Floats:
        """Forward plus backward from ``first`` on."""
        row: Floats = self._times.row(first) * self._factor[first]
        return row


def _prefix(name: str, seconds: Sequence[float]) -> Floats:
    values = np.asarray(seconds, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{name} times must be one number per layer, not an array of shape {values.shape}")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"{name} times must be finite and not negative; use TableTimes to mark what cannot run")
    return np.concatenate([np.zeros(1), np.cumsum(values)])


def _square(name: str, seconds: ArrayLike) -> Floats:
    values = np.array(seconds, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or len(values) < 2:
        raise ValueError(f"{name} times must be [layers + 1, layers + 1], not {list(values.shape)}")
    values = _upper(values)
    if not (values >= 0).all():
        raise ValueError(f"{name} times must be numbers and not negative; infinity marks what cannot run")
    return values


def _upper(table: Floats) -> Floats:
    """Zero the diagonal and put infinity below it, in place."""
    for first in range(1, len(table)):
        table[first, :first] = np.inf
    np.fill_diagonal(table, 0.0)
    return table
