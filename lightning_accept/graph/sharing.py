"""Which values of a graph share memory, and which memory is overwritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_accept.graph.ops import GETITEM, get_op, overwritten
from lightning_accept.graph.values import Node, Ref, find_refs

Bound = Sequence[Mapping[str, Any]]
"""For every node its arguments by name."""


def memory_roots(nodes: Sequence[Node], bound: Bound) -> dict[Ref, set[Ref]]:
    """For every value the memory it may share: the values, inputs, parameters or buffers that allocated it."""
    roots: dict[Ref, set[Ref]] = {}
    for node, arguments in zip(nodes, bound, strict=True):
        shared: set[Ref] = set()
        for name in get_op(node.op).aliases:
            for ref in find_refs(arguments[name]):
                shared |= roots.get(ref, {ref})
        own = Ref("value", node.name)
        if node.op == GETITEM:
            roots[own] = shared
        else:
            roots[own] = shared or {own}
    return roots


def overwritten_memory(nodes: Sequence[Node], bound: Bound, roots: Mapping[Ref, set[Ref]]) -> dict[Ref, list[int]]:
    """What is overwritten, as in :func:`memory_roots`, and at which positions of ``nodes``."""
    written: dict[Ref, list[int]] = {}
    for position, (node, arguments) in enumerate(zip(nodes, bound, strict=True)):
        for name in overwritten(get_op(node.op), arguments):
            for ref in find_refs(arguments[name]):
                for root in roots.get(ref, {ref}):
                    written.setdefault(root, []).append(position)
    return written
