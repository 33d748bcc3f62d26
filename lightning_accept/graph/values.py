"""The vocabulary of stage programs: references, nodes, and what is known of a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

RefKind = Literal["value", "parameter", "buffer", "constant"]


@dataclass(frozen=True)
class Ref:
    """An argument that stands for something computed, received or stored."""

    kind: RefKind
    name: str

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


class StageDevice:
    """Stands for the device that the stage runs on, whatever device the module was traced on."""

    def __repr__(self) -> str:
        return "<the stage's device>"


STAGE_DEVICE = StageDevice()


@dataclass(frozen=True)
class Autocast:
    """An autocast region of the user's own code: ``dtype`` and whether it is enabled."""

    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        name: Name of its result, unique within a graph.
        op: Name of the operation, as :func:`lightning_accept.graph.ops.get_op` takes it.
        args: Positional arguments; :class:`Ref` for everything that is not plain data.
        kwargs: Keyword arguments.
        grad: Grad mode that the user's code set here; None for the caller's.
        autocast: Autocast region that the user's code opened here; None for the caller's.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    grad: bool | None = None
    autocast: Autocast | None = None

    def refs(self) -> Iterator[Ref]:
        """All references among the arguments, repeated ones included."""
        yield from find_refs(self.args)
        yield from find_refs(list(self.kwargs.values()))


def find_refs(value: Any) -> Iterator[Ref]:
    """All references in a nest of lists and tuples."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_refs(item)


def map_refs(value: Any, change: Callable[[Ref], Any]) -> Any:
    """``value`` with every reference replaced by ``change(reference)``."""
    if isinstance(value, Ref):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_refs(item, change) for item in value)
    return value
