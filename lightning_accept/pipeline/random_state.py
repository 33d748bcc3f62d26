"""Carries the central node's random state along the chain, so that dropout draws what plain training would draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_accept.pipeline.stage import RANDOM_LOCK


@dataclass
class BorrowedState:
    """Tensors of a packet without the random state, and what is returned with the state attached again."""

    tensors: list[Tensor | None]
    returned: list[Tensor] = field(default_factory=list)


@contextmanager
def borrowed_random_state(tensors: Sequence[Tensor | None], present: bool) -> Iterator[BorrowedState]:
    """Run the body with the CPU random state that came as the last of ``tensors``, if ``present``.

    The body sets ``returned``; the state as the body left it is then appended to it. The process's own random state is
    not touched.
    """
    if not present:
        yield BorrowedState(list(tensors))
        return
    *rest, state = tensors
    if state is None:
        raise ValueError("the random state is missing in the packet")
    borrowed = BorrowedState(rest)
    with RANDOM_LOCK, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state.cpu())
        yield borrowed
        borrowed.returned = [*borrowed.returned, torch.get_rng_state()]
