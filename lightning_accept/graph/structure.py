"""The structure of a module's inputs and outputs: nests of tensors and plain values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_accept.graph.errors import TraceError

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


class _TensorMark:
    """Stands for a tensor among the leaves."""

    def __repr__(self) -> str:
        return "<tensor>"


_TENSOR = _TensorMark()


@dataclass(frozen=True)
class InputStructure:
    """How arguments nest, and the values among them that are not tensors.

    Attributes:
        spec: The tree.
        leaves: One entry per leaf: a mark for a tensor, else the value.
        paths: What to call each tensor in a message, in order.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments with ``tensors`` in the tensors' places."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def difference(self, other: InputStructure) -> str | None:
        """Why ``other`` is another structure, in words; None if it is the same."""
        if self.spec != other.spec:
            return "the arguments nest differently"
        for mine, theirs in zip(self.leaves, other.leaves, strict=True):
            if (mine is _TENSOR) != (theirs is _TENSOR):
                return f"an argument was {mine!r} and is now {theirs!r}"
            if mine is not _TENSOR and not _same(mine, theirs):
                return f"an argument that is not a tensor was {mine!r} and is now {theirs!r}"
        return None


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def split_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputStructure, list[Tensor]]:
    """The structure of a call's arguments, and its tensors in a fixed order.

    Raises:
        TraceError: If an argument is neither a tensor nor a plain value nor a known container of such.
    """
    ordered = {name: kwargs[name] for name in sorted(kwargs)}
    entries, spec = pytree.tree_flatten_with_path((tuple(args), ordered))
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    paths: list[str] = []
    for path, leaf in entries:
        name = _path_name(path)
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided:
                raise TraceError(f"{name} has layout {leaf.layout}; pass dense tensors to the pipelined module")
            plain = leaf if type(leaf) is Tensor else leaf.as_subclass(Tensor)
            leaves.append(_TENSOR)
            tensors.append(plain)
            paths.append(name)
        elif leaf is None or isinstance(leaf, _PLAIN):
            leaves.append(leaf)
        else:
            raise TraceError(
                f"{name} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which cannot cross to another "
                "machine; pass tensors, numbers, strings and tuples, lists or dicts of them, or register a dataclass "
                "with torch.export.register_dataclass"
            )
    return InputStructure(spec, tuple(leaves), tuple(paths)), tensors


def _path_name(path: Sequence[Any]) -> str:
    first, second, *rest = path
    if getattr(first, "idx", 0) == 0:
        return f"argument {second.idx}{pytree.keystr(tuple(rest))} of forward"
    return f"keyword argument {second.key!r}{pytree.keystr(tuple(rest))} of forward"


Leaf = tuple[Literal["tensor", "number"], int] | tuple[Literal["constant"], Any]


@dataclass(frozen=True)
class OutputStructure:
    """How a module's output nests.

    Attributes:
        spec: The tree.
        leaves: One entry per leaf: ``("tensor", i)`` for output i, ``("number", i)`` for a Python number that output i
            carries as a 0-d tensor, ``("constant", value)`` otherwise.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    def rebuild(self, outputs: Sequence[Tensor]) -> Any:
        """The module's output, made of ``outputs``."""
        leaves: list[Any] = []
        for kind, value in self.leaves:
            if kind == "tensor":
                leaves.append(outputs[value])
            elif kind == "number":
                leaves.append(outputs[value].item())
            else:
                leaves.append(value)
        return pytree.tree_unflatten(leaves, self.spec)


def split_output(output: Any) -> tuple[OutputStructure, list[Tensor]]:
    """The structure of a module's output, and its tensors in order. Called while the module is being traced.

    Raises:
        TraceError: If the output holds no tensor, or something that is neither tensor nor plain value.
    """
    values, spec = pytree.tree_flatten(output)
    leaves: list[Leaf] = []
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            leaves.append(("tensor", len(tensors)))
            tensors.append(value)
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            leaves.append(("number", len(tensors)))
            dtype = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64}.get(type(value), torch.bool)
            tensors.append(torch.scalar_tensor(value, dtype=dtype))
        elif value is None or isinstance(value, _PLAIN):
            leaves.append(("constant", value))
        else:
            raise TraceError(
                f"the pipelined module returns a {type(value).__module__}.{type(value).__qualname__}; return tensors, "
                "plain values and tuples, lists or dicts of them, or register a dataclass with "
                "torch.export.register_dataclass"
            )
    if not tensors:
        raise TraceError("the pipelined module returns no tensor")
    return OutputStructure(spec, tuple(leaves)), tensors
