"""Where the values of a graph live, what shares memory, and where the graph may be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_accept.graph.allowed import ATEN_OPS, RECOMPUTED_OPS, aten_names
from lightning_accept.graph.ops import draws, get_op, overwritten
from lightning_accept.graph.program import CutValue
from lightning_accept.graph.sharing import memory_roots, overwritten_memory
from lightning_accept.graph.traced import Graph, Value
from lightning_accept.graph.values import Node, Ref, find_refs

# What one more tensor costs on the wire beside its bytes; it also breaks ties in favour of fewer tensors.
_TENSOR_OVERHEAD = 256


class Flow:
    """One mode of a module, ready to be cut.

    Positions count the operations on tensors: a cut at ``p`` lies before ``nodes[p]``.

    Attributes:
        graph: The graph it was made from.
        nodes: Operations on tensors, in order.
        sizes: Arithmetic on sizes, by name; computed again wherever it is needed.
        inputs: Names of the module's inputs.
        outputs: Names of the module's distinct outputs.
        defined: Position at which each value is computed; -1 for inputs.
        blocked: For each position 0 to ``len(nodes)`` whether the graph may not be cut there.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[Ref, Value] = dict(graph.values)
        self.paths = dict(graph.paths)
        self.inputs = list(graph.inputs)
        self.nodes = [node for node in graph.nodes if get_op(node.op).kind != "size"]
        self.sizes = {node.name: node for node in graph.nodes if get_op(node.op).kind == "size"}
        self.outputs = self._own_outputs(list(dict.fromkeys(graph.outputs)))
        self._advance_buffer_updates()
        self._follow_input_dtype()
        self.bound = self._bind()
        self.roots = memory_roots(self.nodes, self.bound)
        self.differentiable = self._differentiable()
        self.nodes = self._without_needless_overwriting()
        self.bound = self._bind()
        self.roots = memory_roots(self.nodes, self.bound)
        self.defined = {name: -1 for name in self.inputs}
        self.defined.update((node.name, position) for position, node in enumerate(self.nodes))
        self.random = [draws(get_op(node.op), bound) for node, bound in zip(self.nodes, self.bound, strict=True)]
        self.written = overwritten_memory(self.nodes, self.bound, self.roots)
        self.last_use = self._last_uses()
        self.blocked = self._blocked()

    def value(self, name: str) -> Value:
        """What is known of a value."""
        return self.values[Ref("value", name)]

    def cut_value(self, name: str) -> CutValue:
        """The same as others see it."""
        value = self.value(name)
        assert value.dtype is not None
        return CutValue(name, value.shape, value.dtype, value.dynamic, self.differentiable[name])

    def has_effect(self, position: int) -> bool:
        """Whether an operation must run even if nobody uses its result: it overwrites something or draws numbers."""
        return self.random[position] or bool(overwritten(get_op(self.nodes[position].op), self.bound[position]))

    def is_recomputable(self, name: str) -> bool:
        """Whether a value is so cheap and pure that a stage may compute it again instead of receiving it."""
        position = self.defined[name]
        if position < 0:
            return False
        node = self.nodes[position]
        if node.op not in RECOMPUTED_OPS or self.differentiable[name]:
            return False
        for ref in [Ref("value", name), *node.refs()]:
            if ref.kind == "parameter" or any(root in self.written for root in self.roots.get(ref, {ref})):
                return False
            if ref.kind == "value" and ref.name not in self.sizes and self.values[ref].kind != "tensor":
                return False
        return True

    def live(self, position: int) -> list[str]:
        """Values computed before ``position`` and used at or after it."""
        return [name for name, start in self.defined.items() if start < position <= self.last_use.get(name, -2)]

    def cheapest(self, targets: Iterable[str]) -> list[str]:
        """What to send so that ``targets`` can be had on the other side, for the least bytes.

        A minimum vertex cut: a value is either sent, or recomputed from values that are all at hand in turn.
        """
        targets = list(dict.fromkeys(targets))
        if not any(self.is_recomputable(name) for name in targets):
            return sorted(targets, key=self._order)
        closure: dict[str, list[str]] = {}
        pending = list(targets)
        while pending:
            name = pending.pop()
            if name in closure:
                continue
            sources = self._sources(name) if self.is_recomputable(name) else []
            closure[name] = sources
            pending.extend(sources)
        capacities = {name: self.value(name).nbytes + _TENSOR_OVERHEAD for name in closure}
        fixed = {name for name in closure if not self.is_recomputable(name)}
        return sorted(_vertex_cut(closure, capacities, fixed, set(targets)), key=self._order)

    def _order(self, name: str) -> tuple[int, int]:
        position = self.defined[name]
        return position, self.inputs.index(name) if position < 0 else 0

    def _sources(self, name: str) -> list[str]:
        refs = self.nodes[self.defined[name]].refs()
        return [ref.name for ref in refs if ref.kind == "value" and ref.name not in self.sizes]

    def _own_outputs(self, refs: list[Ref]) -> list[str]:
        """Names of the outputs; a parameter or buffer that is returned as it is becomes a value first."""
        names = []
        for ref in refs:
            if ref.kind != "value":
                name = f"output:{ref.kind}:{ref.name}"
                self.nodes.append(Node(name, "aten.alias.default", (ref,)))
                self.values[Ref("value", name)] = self.values[ref]
                self.paths[name] = ("",)
                names.append(name)
            else:
                names.append(ref.name)
        return names

    def _advance_buffer_updates(self) -> None:
        """Move updates of whole buffers from the end of the graph to where they belong.

        They are there because an assignment such as ``self.mean = ...`` is recorded after forward has ended.
        """
        moved: list[Node] = []
        while self.nodes and self.nodes[-1].op == "aten.copy_.default" and self.nodes[-1].args[0].kind == "buffer":
            moved.insert(0, self.nodes.pop())
        for update in moved:
            refs = set(update.refs())
            uses = [
                position
                for position, node in enumerate(self.nodes)
                if Ref("value", node.name) in refs or refs & set(node.refs())
            ]
            self.nodes.insert(max(uses, default=-1) + 1, update)

    def _follow_input_dtype(self) -> None:
        """Let a recurrent layer's initial state of zeros take the input's dtype when it runs, as torch.nn does.

        The trace knows only the dtype without autocast.
        """
        positions = {node.name: position for position, node in enumerate(self.nodes)}
        for position, node in enumerate(self.nodes):
            if node.op not in _RECURRENT or not isinstance(source := node.args[0], Ref):
                continue
            for state in find_refs(node.args[1]):
                at = positions.get(state.name, position) if state.kind == "value" else position
                zeros = self.nodes[at]
                if zeros.op == "aten.zeros.default" and positions.get(source.name, -1) < at:
                    self.nodes[at] = replace(zeros, op="aten.new_zeros.default", args=(source, *zeros.args), kwargs={})

    def _without_needless_overwriting(self) -> list[Node]:
        """In-place operations on values without gradient that nobody else sees become ordinary ones.

        ``torch.zeros_like(mask).masked_fill_(mask, -inf)`` can then be computed again on another stage.
        """
        users: dict[str, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for ref in node.refs():
                if ref.kind == "value":
                    users.setdefault(ref.name, []).append(position)
        creators = {node.name: node for node in self.nodes}
        nodes = []
        for position, node in enumerate(self.nodes):
            packet, overload = node.op.split(".")[1:] if node.op.startswith("aten.") else ("", "")
            plain = f"aten.{packet.rstrip('_')}.{overload}"
            target = node.args[0] if node.args else None
            if (
                packet.endswith("_")
                and plain in RECOMPUTED_OPS
                and plain in ATEN_OPS
                and isinstance(target, Ref)
                and target.kind == "value"
                and users[target.name] == [position]
                and target.name in creators
                and not get_op(creators[target.name].op).aliases
                and creators[target.name].op in RECOMPUTED_OPS
                and self.values[target].dtype == self.values[Ref("value", node.name)].dtype
                and not self.differentiable[node.name]
            ):
                node = Node(node.name, plain, node.args, node.kwargs, node.grad, node.autocast)
            nodes.append(node)
        return nodes

    def _bind(self) -> list[dict[str, Any]]:
        return [get_op(node.op).bind(node.args, node.kwargs) for node in self.nodes]

    def _differentiable(self) -> dict[str, bool]:
        result = {}
        for name in self.inputs:
            dtype = self.value(name).dtype
            result[name] = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        for node in self.nodes:
            value = self.value(node.name)
            real = value.kind == "tensors" or (
                value.dtype is not None and (value.dtype.is_floating_point or value.dtype.is_complex)
            )
            # A value written in place takes over the gradient of what was written into it.
            result[node.name] = (
                real
                and node.grad is not False
                and node.op not in _NO_GRADIENT
                and any(ref.kind == "parameter" or result.get(ref.name, False) for ref in node.refs())
            )
            op = get_op(node.op)
            if op.inplace and result[node.name]:
                bound = op.bind(node.args, node.kwargs)
                for target in (ref for name in op.writes for ref in find_refs(bound[name])):
                    family = self.roots.get(target, {target})
                    for ref, shared in self.roots.items():
                        if shared & family and ref.name in result:
                            result[ref.name] = True
        return result

    def _last_uses(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            for ref in node.refs():
                if ref.kind == "value" and ref.name not in self.sizes:
                    last[ref.name] = position
        last.update((name, len(self.nodes)) for name in self.outputs)
        return last

    def _blocked(self) -> list[bool]:
        blocked = [False] * (len(self.nodes) + 1)

        def forbid(first: int, last: int) -> None:
            """No cut between the operations at ``first`` and ``last``."""
            for position in range(max(first, -1) + 1, last + 1):
                blocked[position] = True

        uses: dict[Ref, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for ref in node.refs():
                if ref.kind in ("parameter", "buffer"):
                    uses.setdefault(ref, []).append(position)
                for root in self.roots.get(ref, ()):
                    if root.kind in ("parameter", "buffer"):
                        uses.setdefault(root, []).append(position)
        for ref, positions in uses.items():
            if ref.kind == "parameter" or ref in self.written:
                forbid(positions[0], positions[-1])
        for root, positions in self.written.items():
            if root.kind == "value":
                forbid(self.defined[root.name], positions[-1])
        for name, start in self.defined.items():
            if start >= 0 and self.value(name).kind != "tensor":
                forbid(start, self.last_use.get(name, start))
        blocked[0] = blocked[-1] = False
        return blocked


_RECURRENT = aten_names("gru.input lstm.input rnn_relu.input rnn_tanh.input")
_NO_GRADIENT = aten_names(
    """
    arange.default arange.start arange.start_step bernoulli.default detach.default detach_.default empty_like.default
    full_like.default new_empty.default new_full.default new_ones.default new_zeros.default ones_like.default
    rand_like.default randn_like.default sign.default floor.default ceil.default round.default zeros_like.default
    """
)


def _vertex_cut(
    sources: dict[str, list[str]], capacities: dict[str, int], fixed: set[str], targets: set[str]
) -> list[str]:
    """Minimum vertex cut between ``fixed`` and ``targets`` by augmenting paths; the cut nearest to the targets.

    Args:
        sources: For each vertex those it is computed from.
        capacities: Cost of cutting each vertex.
        fixed: Vertices that cannot be computed on the far side.
        targets: Vertices needed on the far side.
    """
    infinite = sum(capacities.values()) + 1
    start, end = ("start", ""), ("end", "")
    residual: dict[tuple[str, str], dict[tuple[str, str], int]] = {start: {}, end: {}}

    def edge(one: tuple[str, str], other: tuple[str, str], capacity: int) -> None:
        residual.setdefault(one, {})[other] = capacity
        residual.setdefault(other, {}).setdefault(one, 0)

    for name, inputs in sources.items():
        edge(("in", name), ("out", name), capacities[name])
        for source in inputs:
            edge(("out", source), ("in", name), infinite)
    for name in fixed:
        edge(start, ("in", name), infinite)
    for name in targets:
        edge(("out", name), end, infinite)
    while True:
        parents: dict[tuple[str, str], tuple[str, str]] = {start: start}
        queue = [start]
        for vertex in queue:
            for neighbour, capacity in residual[vertex].items():
                if capacity > 0 and neighbour not in parents:
                    parents[neighbour] = vertex
                    queue.append(neighbour)
        if end not in parents:
            break
        path = [end]
        while path[-1] != start:
            path.append(parents[path[-1]])
        path.reverse()
        flow = min(residual[a][b] for a, b in pairwise(path))
        for a, b in pairwise(path):
            residual[a][b] -= flow
            residual[b][a] += flow
    reaching = {end}
    queue = [end]
    for vertex in queue:
        for neighbour in residual[vertex]:
            if residual[neighbour][vertex] > 0 and neighbour not in reaching:
                reaching.add(neighbour)
                queue.append(neighbour)
    return [name for name in sources if ("out", name) in reaching and ("in", name) not in reaching]
