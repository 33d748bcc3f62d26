"""Cutting one mode of a module out of its graph: the nodes between two positions, with what they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from lightning_accept.graph.flow import Flow
from lightning_accept.graph.ops import SYM_SIZE
from lightning_accept.graph.program import ModeProgram
from lightning_accept.graph.traced import Size
from lightning_accept.graph.values import Node, Ref, map_refs


class UnknownSize(Exception):
    """A size cannot be derived from the tensors at hand."""


def needed_before(flow: Flow, first: int, last: int, wanted: Iterable[str]) -> list[str]:
    """Values computed before ``first`` that ``nodes[first:last]`` need in order to give ``wanted``."""
    _, outside = _kept(flow, first, last, wanted)
    return outside


def cut_out(flow: Flow, first: int, last: int, inputs: Sequence[str], outputs: Sequence[str]) -> ModeProgram:
    """The program that computes ``outputs`` from ``inputs`` with ``nodes[first:last]``.

    Raises:
        UnknownSize: If it needs a size that its tensors do not tell.
    """
    return _Slice(flow, first, last, inputs, outputs).program()


def _kept(flow: Flow, first: int, last: int, wanted: Iterable[str]) -> tuple[list[int], list[str]]:
    """Positions of the nodes that matter, and the values from before ``first`` that they need."""
    outside: dict[str, None] = {}
    needed: set[str] = set()
    for name in wanted:
        if flow.defined[name] < first:
            outside[name] = None
        else:
            needed.add(name)
    kept = []
    for position in reversed(range(first, last)):
        node = flow.nodes[position]
        if node.name not in needed and not flow.has_effect(position):
            continue
        kept.append(position)
        for ref in node.refs():
            if ref.kind != "value" or ref.name in flow.sizes:
                continue
            if flow.defined[ref.name] < first:
                outside[ref.name] = None
            else:
                needed.add(ref.name)
    return kept[::-1], list(outside)


class _Slice:
    def __init__(self, flow: Flow, first: int, last: int, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.flow = flow
        self.inputs = inputs
        self.outputs = outputs
        self.kept, self.outside = _kept(flow, first, last, outputs)
        self.nodes: list[Node] = []
        self.count = 0
        self.available: dict[str, tuple[Size, ...]] = {name: flow.value(name).sizes for name in inputs}
        self.size_values: dict[str, Ref | int] = {}
        self.expressions: dict[Size, Ref | int] = {}

    def program(self) -> ModeProgram:
        for name in self.outside:
            self.recompute(name)
        for position in self.kept:
            self.emit(self.flow.nodes[position])
        return ModeProgram(
            tuple(self.flow.cut_value(name) for name in self.inputs), tuple(self.nodes), tuple(self.outputs)
        )

    def recompute(self, name: str) -> None:
        """Compute a cheap value from before the slice again, unless it was received."""
        if name in self.available:
            return
        if not self.flow.is_recomputable(name):
            raise AssertionError(f"{name} is neither sent nor cheap to compute again")
        node = self.flow.nodes[self.flow.defined[name]]
        for ref in node.refs():
            if ref.kind == "value" and ref.name not in self.flow.sizes:
                self.recompute(ref.name)
        self.emit(node)

    def emit(self, node: Node) -> None:
        args = map_refs(node.args, self.with_sizes)
        kwargs = {name: map_refs(value, self.with_sizes) for name, value in node.kwargs.items()}
        self.nodes.append(Node(node.name, node.op, args, kwargs, node.grad, node.autocast))
        value = self.flow.value(node.name)
        if value.kind == "tensor":
            self.available[node.name] = value.sizes

    def with_sizes(self, ref: Ref) -> Ref | int:
        if ref.kind == "value" and ref.name in self.flow.sizes:
            if ref.name not in self.size_values:
                self.size_values[ref.name] = self.size(ref.name)
            return self.size_values[ref.name]
        return ref

    def size(self, name: str) -> Ref | int:
        """A size, read off a tensor at hand or computed from sizes that are."""
        expression = self.flow.graph.sizes[name]
        if isinstance(expression, int):
            return expression
        found = self.read(expression)
        if found is not None:
            return found
        node = self.flow.sizes[name]
        if node.op != SYM_SIZE:
            try:
                args = tuple(map_refs(node.args, self.with_sizes))
            except UnknownSize:
                pass
            else:
                return self.append(node.op, args)
        return self.expression(expression)

    def read(self, expression: Size) -> Ref | None:
        known = self.expressions.get(expression)
        if isinstance(known, Ref):
            return known
        for name, sizes in self.available.items():
            for dim, size in enumerate(sizes):
                if size == expression:
                    return self.remember(expression, self.append(SYM_SIZE, (Ref("value", name), dim)))
        return None

    def remember(self, expression: Size, ref: Ref) -> Ref:
        self.expressions[expression] = ref
        return ref

    def append(self, op: str, args: tuple[object, ...]) -> Ref:
        name = f"size:{self.count}"
        self.count += 1
        self.nodes.append(Node(name, op, args))
        return Ref("value", name)

    def expression(self, expression: Size) -> Ref | int:
        """A size from its symbolic form."""
        if isinstance(expression, int):
            return expression
        if expression.is_Integer:
            return int(expression)
        found = self.read(expression)
        if found is not None:
            return found
        if expression.is_Symbol:
            return self.remember(expression, self.solve(expression))
        arithmetic = {
            sympy.Add: "operator.add",
            sympy.Mul: "operator.mul",
            FloorDiv: "operator.floordiv",
            Mod: "operator.mod",
            PythonMod: "operator.mod",
        }
        op = arithmetic.get(expression.func)
        if op is None:
            raise UnknownSize(str(expression))
        parts = [self.expression(part) for part in expression.args]
        result = parts[0]
        for part in parts[1:]:
            result = self.append(op, (result, part))
        assert isinstance(result, Ref)
        return self.remember(expression, result)

    def solve(self, symbol: sympy.Symbol) -> Ref:
        """A symbol from a dimension that is a linear function of it, such as a sequence with one token more."""
        for name, sizes in self.available.items():
            for dim, size in enumerate(sizes):
                if isinstance(size, int) or size.free_symbols != {symbol} or not size.is_polynomial(symbol):
                    continue
                polynomial = size.as_poly(symbol)
                if polynomial.degree() != 1:
                    continue
                factor, offset = (int(value) for value in polynomial.all_coeffs())
                result = self.append(SYM_SIZE, (Ref("value", name), dim))
                if offset:
                    result = self.append("operator.sub", (result, offset))
                return self.append("operator.floordiv", (result, factor)) if factor != 1 else result
        raise UnknownSize(str(symbol))
