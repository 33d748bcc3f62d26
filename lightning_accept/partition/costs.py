"""What stages and links cost in the planner's search: seconds first, then bytes among the fastest."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lightning_accept.partition.problem import Problem
from lightning_accept.partition.times import Floats


class Costs(Protocol):
    """Costs of the parts of a chain, infinity where a part is impossible; L is the number of layers."""

    def central(self) -> Floats:
        """Stage 0 by the layer after its last, ``[L + 1]``."""

    def stage(self, device: int) -> Floats:
        """A worker's stage at ``[first, stop]``, ``[L + 1, L + 1]``, a new array."""

    def row(self, device: int, first: int) -> Floats:
        """A worker's stage by the layer after its last, ``[L + 1]``."""

    def link(self, source: int, target: int) -> Floats:
        """The link between neighbours by the cut, ``[L + 1]``."""

    def home(self, device: int) -> float:
        """The last hop from ``device`` to the central node."""

    def both(self, device: int) -> Floats:
        """The link of an only worker, which carries both hops, by the cut, ``[L + 1]``."""


class SecondsCosts:
    """Seconds for which a part is busy per batch; a stage as its device's compute or its way into the network.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._down, self._up = problem.crossing()

    def central(self) -> Floats:
        """Stage 0."""
        problem, device = self._problem, self._problem.devices[0]
        seconds = np.maximum(self.central_compute(), self.central_network())
        seconds[problem.memory_prefix(0) > device.memory] = np.inf
        seconds[: problem.central_minimum] = np.inf
        if problem.share:
            seconds[-1] = np.inf
        return seconds

    def central_compute(self) -> Floats:
        """Compute of stage 0 with the loss; what it sends and takes back is handled here too, if anything is sent."""
        device = self._problem.devices[0]
        seconds = device.times.row(0) + self._problem.loss_time
        seconds[:-1] += device.handles.before[:-1] + device.handles.after[-1]
        return seconds

    def central_network(self) -> Floats:
        """How long the central node sends or receives."""
        device, down, up = self._problem.devices[0], self._down, self._up
        sent = 8.0 * (down + up[-1]) / device.uplink
        seconds: Floats = np.maximum(sent, 8.0 * (up + down[-1]) / device.downlink)
        seconds[-1] = 0.0
        return seconds

    def stage(self, device: int) -> Floats:
        """A worker's stage, of one layer at least."""
        chosen = self._problem.devices[device]
        seconds = chosen.times.table()
        seconds += self._handled(device)
        np.maximum(seconds, self._network(device), out=seconds)
        np.fill_diagonal(seconds, np.inf)
        if np.isfinite(chosen.memory):
            prefix = self._problem.memory_prefix(device)
            seconds[prefix[None, :] - prefix[:, None] > chosen.memory] = np.inf
        return seconds

    def row(self, device: int, first: int) -> Floats:
        """A worker's stages that begin with one layer."""
        chosen = self._problem.devices[device]
        seconds = np.maximum(self.compute(device, first), self.network(device, first))
        seconds[first] = np.inf
        prefix = self._problem.memory_prefix(device)
        seconds[prefix - prefix[first] > chosen.memory] = np.inf
        return seconds

    def compute(self, device: int, first: int) -> Floats:
        """Compute of a worker's stages that begin with one layer."""
        handles = self._problem.devices[device].handles
        seconds: Floats = self._problem.devices[device].times.row(first) + (handles.after[first] + handles.before)
        return seconds

    def network(self, device: int, first: int) -> Floats:
        """How long a worker whose stage begins with one layer sends or receives."""
        chosen, down, up = self._problem.devices[device], self._down, self._up
        sent: Floats = 8.0 * (up[first] + down) / chosen.uplink
        taken: Floats = 8.0 * (down[first] + up) / chosen.downlink
        return np.maximum(sent, taken)

    def link(self, source: int, target: int) -> Floats:
        """The link between two neighbours."""
        return self._problem.way(source, target).busy(self._down, self._up)

    def home(self, device: int) -> float:
        """The last hop."""
        return float(self._problem.way(device, 0).busy(self._down[-1], self._up[-1]))

    def both(self, device: int) -> Floats:
        """An only worker's link: the output's gradient goes the way of the activations, the output the other."""
        link = self._problem.way(0, device)
        return link.busy(self._down + self._up[-1], self._up + self._down[-1])

    def _handled(self, device: int) -> Floats:
        handles = self._problem.devices[device].handles
        together: Floats = handles.after[:, None] + handles.before[None, :]
        return together

    def _network(self, device: int) -> Floats:
        chosen, down, up = self._problem.devices[device], self._down, self._up
        sent: Floats = 8.0 * (up[:, None] + down[None, :]) / chosen.uplink
        taken: Floats = 8.0 * (down[:, None] + up[None, :]) / chosen.downlink
        return np.maximum(sent, taken)


class BytesCosts:
    """Bytes per batch, only of parts that are not busy for longer than ``limit`` seconds."""

    def __init__(self, problem: Problem, seconds: SecondsCosts, limit: float) -> None:
        self._seconds = seconds
        self._limit = limit
        down, up = problem.crossing()
        self._cut = down + up

    def central(self) -> Floats:
        """Nothing, or infinity."""
        return self._within(self._seconds.central(), np.zeros(()))

    def stage(self, device: int) -> Floats:
        """Nothing, or infinity."""
        return self._within(self._seconds.stage(device), np.zeros(()))

    def row(self, device: int, first: int) -> Floats:
        """Nothing, or infinity."""
        return self._within(self._seconds.row(device, first), np.zeros(()))

    def link(self, source: int, target: int) -> Floats:
        """Bytes of the cut, both ways."""
        return self._within(self._seconds.link(source, target), self._cut)

    def home(self, device: int) -> float:
        """Bytes of the output and its gradient."""
        return float(self._cut[-1]) if self._seconds.home(device) <= self._limit else np.inf

    def both(self, device: int) -> Floats:
        """Bytes of the cut, the output and its gradient."""
        return self._within(self._seconds.both(device), self._cut + self._cut[-1])

    def _within(self, seconds: Floats, cost: Floats) -> Floats:
        return np.where(seconds <= self._limit, cost, np.inf)
