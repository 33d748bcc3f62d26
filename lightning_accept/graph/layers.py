"""Naming: cuts grouped by module path become layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lightning_accept.graph.allowed import aten_names
from lightning_accept.graph.flow import Flow
from lightning_accept.graph.slicing import UnknownSize, cut_out
from lightning_accept.graph.values import Node

# A module that holds more than this share of the work is looked into.
_LARGE_SHARE = 0.25
# With fewer layers than this, cuts that more tensors cross are taken as well.
_FEW_LAYERS = 4

# Operations that keep the shape: where they stand alone between two layers they belong to what they follow.
_POINTWISE_NAMES = """
    relu relu_ relu6 relu6_ gelu gelu_ silu silu_ mish mish_ elu elu_ selu selu_ celu celu_ leaky_relu leaky_relu_
    prelu rrelu rrelu_ hardtanh hardtanh_ hardswish hardswish_ hardsigmoid hardsigmoid_ softplus softshrink hardshrink
    threshold threshold_ sigmoid sigmoid_ tanh tanh_ batch_norm layer_norm group_norm instance_norm rms_norm dropout
    dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_
    """
_POINTWISE = frozenset(f"{name}.default" for name in aten_names(_POINTWISE_NAMES)) | {"aten.add_.Tensor"}

_EMBEDDINGS = frozenset({"aten.embedding.default", "aten.embedding_bag.default", "aten.embedding_bag.padding_idx"})


@dataclass(frozen=True)
class Unit:
    """A run of nodes that belong to one module (or to the code between modules, then ``glue``).

    Attributes:
        path: Dotted path of the module; of the parameter where a node outside any submodule uses one.
        first: Position of its first node.
        last: Position after its last node.
        glue: Whether it is code of a module that was looked into, not a module of its own.
        heavy: Whether it holds products or an embedding, and so can be a layer.
    """

    path: str
    first: int
    last: int
    glue: bool
    heavy: bool


@dataclass(frozen=True)
class Boundary:
    """A cut between two layers: its position in the train graph and in the eval graph."""

    train: int
    eval: int


@dataclass(frozen=True)
class Grouping:
    """Layers of a module: ``len(names)`` names and one boundary fewer."""

    names: list[str]
    boundaries: list[Boundary]


def group(module: nn.Module, train: Flow, evaluation: Flow, flops: Sequence[int]) -> Grouping:
    """Find the layers.

    Args:
        module: The traced module, for the types of its submodules.
        train: Its train mode.
        evaluation: Its eval mode.
        flops: FLOPs of each node of ``train``.
    """
    finder = _Finder(module, train, evaluation, flops)
    best: Grouping | None = None
    for share, slack in ((_LARGE_SHARE, 0), (_LARGE_SHARE, 1), (0.0, 0), (0.0, 1), (0.0, 2), (0.0, 4)):
        found = finder.find(share, slack)
        if best is None or len(found.names) > len(best.names):
            best = found
        if len(best.names) >= _FEW_LAYERS:
            break
    assert best is not None
    return best


class _Finder:
    def __init__(self, module: nn.Module, train: Flow, evaluation: Flow, flops: Sequence[int]) -> None:
        self.module = module
        self.train = train
        self.evaluation = evaluation
        self.flops = flops
        self.counts: dict[int, int] = {}
        self.containers = {
            name
            for name, child in module.named_modules()
            if name == "" or type(child) in (nn.Sequential, nn.ModuleList)
        }

    def find(self, share: float, slack: int) -> Grouping:
        expanded = set(self.containers)
        while True:
            units = self.units(self.train, expanded)
            grown = {
                path
                for path in {unit.path for unit in units if not unit.glue}
                if self.is_divisible(path) and self.share([unit for unit in units if unit.path == path]) > share
            }
            if not grown:
                break
            expanded |= grown
        positions = self.boundaries(units)
        positions = self.good_inside(positions, expanded - self.containers, slack)
        positions = self.without_peaks(positions, share)
        return self.named(units, self.matched(positions, expanded))

    def units(self, flow: Flow, expanded: set[str]) -> list[Unit]:
        units: list[Unit] = []
        for position, node in enumerate(flow.nodes):
            path, glue = self.unit_path(flow, node, expanded)
            heavy = self.is_heavy(flow, position)
            if glue and heavy:
                parameter = next((ref.name for ref in node.refs() if ref.kind == "parameter"), None)
                if parameter is not None:
                    path, glue = parameter, False
            if units and units[-1].path == path and units[-1].glue == glue:
                units[-1] = Unit(path, units[-1].first, position + 1, glue, heavy or units[-1].heavy)
            else:
                units.append(Unit(path, position, position + 1, glue, heavy))
        return units

    def is_heavy(self, flow: Flow, position: int) -> bool:
        if flow.nodes[position].op in _EMBEDDINGS:
            return True
        return flow is self.train and self.flops[position] > 0

    def unit_path(self, flow: Flow, node: Node, expanded: set[str]) -> tuple[str, bool]:
        stack = flow.paths[node.name]
        for path in stack:
            if path not in expanded:
                return path, False
        return stack[-1], True

    def is_divisible(self, path: str) -> bool:
        """Whether a module holds other modules that do something, or several products of its own."""
        deeper = heavy = 0
        for position, node in enumerate(self.train.nodes):
            stack = self.train.paths[node.name]
            if path in stack:
                deeper += stack[-1] != path
                heavy += self.is_heavy(self.train, position)
        return bool(deeper) or heavy > 1

    def share(self, units: Sequence[Unit]) -> float:
        """The larger of the units' share of FLOPs and of nodes."""
        nodes = sum(unit.last - unit.first for unit in units) / max(len(self.train.nodes), 1)
        total = sum(self.flops)
        flops = sum(sum(self.flops[unit.first : unit.last]) for unit in units)
        return max(nodes, flops / total if total else 0.0)

    def count(self, position: int) -> int:
        """How many tensors have to be sent at a position."""
        if position not in self.counts:
            self.counts[position] = len(self.train.cheapest(self.train.live(position)))
        return self.counts[position]

    def boundaries(self, units: list[Unit]) -> list[int]:
        """One position between each two neighbouring heavy units, where there is one to cut at."""
        heavy = [unit for unit in units if unit.heavy and not unit.glue]
        if len(heavy) < 2:
            heavy = [unit for unit in units if not unit.glue]
        positions = []
        for left, right in pairwise(heavy):
            wanted = self.wanted(units, left, right)
            possible = [position for position in range(left.last, right.first + 1) if not self.train.blocked[position]]
            if possible:
                positions.append(min(possible, key=lambda p: (self.count(p), abs(p - wanted), p)))
        return sorted(set(positions))

    def wanted(self, units: list[Unit], left: Unit, right: Unit) -> int:
        """Where the code between two heavy units divides: what belongs to the left one first, the rest to the right."""
        before, after = _parent(left.path), _parent(right.path)
        position = left.last
        for unit in units:
            if unit.first < left.last or unit.last > right.first:
                continue
            home = unit.path if unit.glue else _parent(unit.path)
            pointwise = all(self.train.nodes[p].op in _POINTWISE for p in range(unit.first, unit.last))
            if home != before and (home == after or not pointwise):
                break
            position = unit.last
        return position

    def good_inside(self, positions: list[int], opened: set[str], slack: int) -> list[int]:
        """Drop cuts inside a module that more tensors cross than its own ends."""
        spans = []
        for path in opened:
            own = [p for p, node in enumerate(self.train.nodes) if path in self.train.paths[node.name]]
            spans.append((own[0], own[-1] + 1))
        kept = []
        for position in positions:
            limits = [
                max(self.edge_count(first, positions), self.edge_count(last, positions))
                for first, last in spans
                if first < position < last
            ]
            if not limits or self.count(position) <= min(limits) + slack:
                kept.append(position)
        return kept

    def edge_count(self, edge: int, positions: list[int]) -> int:
        """Tensors that cross the end of a module: at the end itself or at the cut chosen next to it."""
        if edge in (0, len(self.train.nodes)):
            return 1
        near = min(positions, key=lambda p: abs(p - edge), default=edge)
        return min(self.count(edge), self.count(near)) if abs(near - edge) <= 4 else self.count(edge)

    def without_peaks(self, positions: list[int], share: float) -> list[int]:
        """Drop cuts that more tensors cross than both neighbouring ones, as long as no layer grows too large."""
        kept = list(positions)
        changed = True
        while changed and len(kept) >= 2 * _FEW_LAYERS:
            changed = False
            edges = [0, *kept, len(self.train.nodes)]
            for i, position in enumerate(kept):
                left = self.count(kept[i - 1]) if i > 0 else 1
                right = self.count(kept[i + 1]) if i + 1 < len(kept) else 1
                merged = Unit("", edges[i], edges[i + 2], True, True)
                if self.count(position) > max(left, right) and self.share([merged]) <= share:
                    kept.remove(position)
                    changed = True
                    break
        return kept

    def matched(self, positions: list[int], expanded: set[str]) -> list[Boundary]:
        """Find the same cuts in the eval graph; drop those that are none there, or that would divide a parameter."""
        boundaries = []
        lowest = 0
        for position in positions:
            found = self.counterpart(position, expanded, lowest)
            if found is not None:
                boundaries.append(Boundary(position, found))
                lowest = found
        return self.consistent(boundaries)

    def counterpart(self, position: int, expanded: set[str], lowest: int) -> int | None:
        """The position in the eval graph that leaves the same nodes on each side."""
        keys = {key: p for p, key in enumerate(self.keys(self.train, expanded))}
        images: list[int] = []
        for key in self.keys(self.evaluation, expanded):
            images.append(keys.get(key, images[-1] if images else -1))
        possible = [
            p for p in range(lowest, len(self.evaluation.nodes) + 1) if not self.evaluation.blocked[p] or p == 0
        ]
        best, least = None, None
        for p in possible:
            wrong = sum(image >= position for image in images[:p]) + sum(image < position for image in images[p:])
            if least is None or wrong < least:
                best, least = p, wrong
        return best if least is not None and 4 * least <= len(images) else None

    def keys(self, flow: Flow, expanded: set[str]) -> list[tuple[str, str, int]]:
        seen: dict[tuple[str, str], int] = {}
        keys = []
        for node in flow.nodes:
            key = (flow.paths[node.name][-1], node.op)
            seen[key] = seen.get(key, 0) + 1
            keys.append((*key, seen[key]))
        return keys

    def consistent(self, boundaries: list[Boundary]) -> list[Boundary]:
        """Drop boundaries that part a parameter's or a changing buffer's users, over both modes together."""
        homes: dict[str, set[int]] = {}
        for flow, cuts in (
            (self.train, [b.train for b in boundaries]),
            (self.evaluation, [b.eval for b in boundaries]),
        ):
            for position, node in enumerate(flow.nodes):
                layer = sum(cut <= position for cut in cuts)
                for ref in node.refs():
                    changing = ref in self.train.written or ref in self.evaluation.written
                    if ref.kind == "parameter" or (ref.kind == "buffer" and changing):
                        homes.setdefault(f"{ref.kind}:{ref.name}", set()).add(layer)
        dropped = {index for layers in homes.values() for index in range(min(layers), max(layers))}
        return [boundary for index, boundary in enumerate(boundaries) if index not in dropped]

    def named(self, units: list[Unit], boundaries: list[Boundary]) -> Grouping:
        edges = [0, *(boundary.train for boundary in boundaries), len(self.train.nodes)]
        layers = list(pairwise(edges))
        homes: dict[str, set[int]] = {}
        for index, (first, last) in enumerate(layers):
            for unit in units:
                if not unit.glue and unit.first < last and unit.last > first:
                    homes.setdefault(unit.path, set()).add(index)
        names: list[str] = []
        for index, (first, last) in enumerate(layers):
            inside = [unit for unit in units if unit.first < last and unit.last > first and not unit.glue]
            chosen = next((unit for unit in inside if unit.heavy), inside[0] if inside else None)
            name = self.widest(chosen.path, index, homes) if chosen is not None else "forward"
            base, count = name, 1
            while name in names:
                count += 1
                name = f"{base}#{count}"
            names.append(name)
        return Grouping(names, boundaries)

    def widest(self, path: str, index: int, homes: dict[str, set[int]]) -> str:
        """The outermost module around ``path`` that lies in this layer as a whole."""
        while "." in path:
            parent = _parent(path)
            inside = {layer for name, layers in homes.items() if name.startswith(parent + ".") for layer in layers}
            if inside != {index} or parent in homes:
                break
            path = parent
        return path


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def is_sliceable(flow: Flow, first: int, last: int, inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    """Whether the sizes that a layer needs can be told from what it receives."""
    try:
        cut_out(flow, first, last, inputs, outputs)
    except UnknownSize:
        return False
    return True
