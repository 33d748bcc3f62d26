"""The dynamic programme over cuts and devices, after AccEPT (arXiv 2311.05827): make the slowest part fastest.

The recursion of the paper, A(l, n) = min over p of max(A(p, n - 1), Tc_p, T_(n-1)(p + 1..l)), is run from the last
device to the first, so that the same table serves to read the plan off from the front. Leaving devices out costs no
more than a minimum over the possible successors of each device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lightning_accept.partition.costs import Costs
from lightning_accept.partition.problem import Problem
from lightning_accept.partition.times import Floats


@dataclass(frozen=True)
class Suffixes:
    """Least costs of the chain's remainder, one array ``[layers + 1]`` per worker.

    Attributes:
        last: The worker takes all layers from the index on; its way home is left out.
        on: The worker takes some layers from the index on, others follow, up to and with the way home.
        best: The cheaper of both, with the way home.
        ahead: What follows once a worker has ended before the layer of the index: the link there and the rest.
    """

    last: dict[int, Floats] = field(default_factory=dict)
    on: dict[int, Floats] = field(default_factory=dict)
    best: dict[int, Floats] = field(default_factory=dict)
    ahead: dict[int, Floats] = field(default_factory=dict)


def successors(problem: Problem, device: int) -> Iterable[int]:
    """The devices that may follow ``device`` in the chain."""
    count = len(problem.devices)
    return range(device + 1, count if problem.may_leave_out else min(device + 2, count))


def may_end(problem: Problem, device: int) -> bool:
    """Whether ``device`` may hold the last stage."""
    return problem.may_leave_out or device == len(problem.devices) - 1


def suffixes(problem: Problem, costs: Costs, combine: np.ufunc) -> Suffixes:
    """Fill the table from the last device to the first worker.

    Args:
        problem: The problem.
        costs: Costs of the parts.
        combine: How they make the cost of a chain: ``np.maximum`` for seconds, ``np.add`` for bytes.
    """
    found = Suffixes()
    nothing = np.full(problem.layers + 1, np.inf)
    for device in range(len(problem.devices) - 1, 0, -1):
        stage = costs.stage(device)
        ahead = nothing.copy()
        for after in successors(problem, device):
            np.minimum(ahead, combine(costs.link(device, after), found.best[after]), out=ahead)
        found.ahead[device] = ahead
        found.last[device] = stage[:, -1].copy() if may_end(problem, device) else nothing
        found.on[device] = combine(stage, ahead[None, :], out=stage).min(axis=1)
        home = np.float64(costs.home(device)) if may_end(problem, device) else np.float64(np.inf)
        found.best[device] = np.minimum(combine(found.last[device], home), found.on[device])
    return found


@dataclass(frozen=True)
class Starts:
    """Least costs of whole chains by the first worker and the first cut.

    Attributes:
        alone: The central node holds everything.
        only: By worker: it is the only one, ``[layers + 1]``.
        first: By worker: it is the first of several, ``[layers + 1]``.
    """

    alone: float
    only: dict[int, Floats]
    first: dict[int, Floats]

    @property
    def least(self) -> float:
        """The least cost of all."""
        arrays = [*self.only.values(), *self.first.values()]
        return min([self.alone, *(float(array.min()) for array in arrays)])


def starts(problem: Problem, costs: Costs, combine: np.ufunc, found: Suffixes) -> Starts:
    """Join the central node's stage to the table."""
    central = costs.central()
    only, first = {}, {}
    for worker in successors(problem, 0):
        only[worker] = combine(combine(central, costs.both(worker)), found.last[worker])
        first[worker] = combine(combine(central, costs.link(0, worker)), found.on[worker])
    return Starts(float(central[-1]) if may_end(problem, 0) else np.inf, only, first)


def cheapest(problem: Problem, costs: Costs) -> list[tuple[int, int]]:
    """The chain of least total bytes; among equals, the one whose cuts come earliest, then the earliest devices.

    Args:
        problem: The problem.
        costs: Additive costs whose sums are exact, so that equal can be told from nearly equal.

    Returns:
        Device and first layer of every stage.
    """
    found = suffixes(problem, costs, np.add)
    begin = starts(problem, costs, np.add, found)
    chain = [(0, 0)]
    if begin.alone == begin.least:
        return chain
    options = [(worker, array) for group in (begin.only, begin.first) for worker, array in group.items()]
    cut, worker = min(
        (int(np.argmax(array == begin.least)), worker) for worker, array in options if array.min() == begin.least
    )
    ends = begin.only[worker][cut] == begin.least
    chain.append((worker, cut))
    while not ends:
        ahead = found.ahead[worker]
        cut = int(np.argmax(costs.row(worker, cut) + ahead == found.on[worker][cut]))
        worker = next(
            after
            for after in successors(problem, worker)
            if costs.link(worker, after)[cut] + found.best[after][cut] == ahead[cut]
        )
        ends = found.last[worker][cut] + costs.home(worker) == found.best[worker][cut]
        chain.append((worker, cut))
    return chain
