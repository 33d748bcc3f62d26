"""Which stage holds what, and what must travel when layers change hands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_accept.graph import Chain, Trace
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.transport import WorkerHandle


@dataclass(frozen=True)
class Target:
    """What a deployment or a move is to lead to.

    Attributes:
        trace: The traced module.
        chain: Its layers.
        starts: Index of the first layer of every worker's stage.
        schedule: Windows and depth.
        optimizers: The LightningModule's optimizers.
        workers: The workers in the order of their stages.
    """

    trace: Trace
    chain: Chain
    starts: list[int]
    schedule: Schedule
    optimizers: Sequence[Optimizer]
    workers: list[WorkerHandle]


@dataclass(frozen=True)
class Holding:
    """What one stage holds.

    Attributes:
        worker: The worker; None for the central node.
        first: Index of its first layer.
        stop: Index after its last layer.
        names: Its parameters, buffers and constants as ``param/NAME``, ``buffer/NAME`` and ``const/NAME``.
    """

    worker: WorkerHandle | None
    first: int
    stop: int
    names: tuple[str, ...]

    @property
    def parameters(self) -> list[str]:
        """Names of its parameters."""
        return [name.removeprefix("param/") for name in self.names if name.startswith("param/")]


@dataclass(frozen=True)
class Passage:
    """What must travel from one placement to the next.

    Attributes:
        sources: For every worker's new stage what workers hold already, as in
            :attr:`lightning_accept.pipeline.messages.Sources.names`; the rest lies on the central node.
        fetched: What the central node takes over, by the worker that holds it.
        layers: How many layers change hands.
    """

    sources: list[dict[str, list[str]]]
    fetched: list[tuple[WorkerHandle, list[str]]]
    layers: int


def place(chain: Chain, starts: Sequence[int], workers: Sequence[WorkerHandle]) -> list[Holding]:
    """What every stage holds, the central node's first.

    Args:
        chain: The layers.
        starts: Index of the first layer of every worker's stage.
        workers: The workers in the order of their stages.
    """
    holdings = []
    edges = itertools.pairwise([0, *starts, len(chain.layers)])
    for worker, (first, stop) in zip([None, *workers], edges, strict=True):
        program = chain.program(first, stop)
        sections: dict[str, Iterable[str]] = {
            "param": program.parameters,
            "buffer": program.buffers,
            "const": program.constants,
        }
        names = tuple(f"{section}/{name}" for section, known in sections.items() for name in known)
        holdings.append(Holding(worker, first, stop, names))
    return holdings


def passage(before: Sequence[Holding], after: Sequence[Holding]) -> Passage:
    """What must travel from ``before`` to ``after``, two placements of the same layers.

    What a worker's own stage holds stays there. What several stages hold, as constants may be, comes from the central
    node if that is one of them.
    """
    holders: dict[str, list[WorkerHandle | None]] = {}
    for holding in before:
        for name in holding.names:
            holders.setdefault(name, []).append(holding.worker)
    fetched: dict[int, tuple[WorkerHandle, list[str]]] = {}
    for name in after[0].names:
        holder = holders[name][0]
        if holder is not None and not name.startswith("const/"):  # the central node has all constants
            fetched.setdefault(id(holder), (holder, []))[1].append(name)
    sources = []
    for holding in after[1:]:
        of_stage: dict[str, list[str]] = {}
        for name in holding.names:
            known = holders[name]
            holder = known[0]
            if holding.worker in known:
                of_stage.setdefault("", []).append(name)
            elif holder is not None:
                of_stage.setdefault(holder.address, []).append(name)
        sources.append(of_stage)
    return Passage(sources, list(fetched.values()), _changing_hands(before, after))


def _changing_hands(before: Sequence[Holding], after: Sequence[Holding]) -> int:
    def owners(placement: Sequence[Holding]) -> list[WorkerHandle | None]:
        return [holding.worker for holding in placement for _ in range(holding.first, holding.stop)]

    return sum(old is not new for old, new in zip(owners(before), owners(after), strict=True))
