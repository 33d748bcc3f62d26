"""A traced module as a chain of layers that stages are made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from lightning_accept.graph.flops import count_flops
from lightning_accept.graph.flow import Flow
from lightning_accept.graph.layers import Boundary, Grouping, group, is_sliceable
from lightning_accept.graph.memory import activation_bytes
from lightning_accept.graph.program import (
    BufferInfo,
    CutValue,
    ModeProgram,
    ParameterInfo,
    StageProgram,
    TensorInfo,
)
from lightning_accept.graph.slicing import cut_out, needed_before
from lightning_accept.graph.tracing import Trace


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        name: Unique; the path of the module that it mostly is.
        parameters: Canonical names of the parameters it uses.
        buffers: Canonical names of the buffers it uses.
        flops: Forward FLOPs of one batch as traced, in train mode.
        weight_bytes: Bytes of its parameters; one that several layers share counts in each.
        activation_bytes: Bytes that it keeps for the backward of one batch as traced, an upper estimate.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    flops: int
    weight_bytes: int = 0
    activation_bytes: int = 0


class Chain:
    """The layers of a traced module, and the programs of runs of them."""

    def __init__(self, trace: Trace, flows: dict[bool, Flow], grouping: Grouping, flops: list[int]) -> None:
        self._trace = trace
        self._flows = flows
        self._edges: dict[bool, list[int]] = {}
        self._cuts: dict[bool, list[list[str]]] = {}
        self._lay_out(grouping)
        edges = self._edges[True]
        kept = activation_bytes(flows[True])
        self.layers: list[Layer] = []
        for index, name in enumerate(grouping.names):
            program = self.program(index, index + 1)
            span = slice(edges[index], edges[index + 1])
            weights = sum(info.nbytes for info in program.parameters.values())
            self.layers.append(
                Layer(
                    name,
                    tuple(program.parameters),
                    tuple(program.buffers),
                    sum(flops[span]),
                    weights,
                    sum(kept[span]),
                )
            )

    @classmethod
    def from_trace(cls, trace: Trace) -> Chain:
        """Cut a traced module into layers."""
        flows = {training: Flow(trace.graphs[training]) for training in (True, False)}
        flops = count_flops(flows[True])
        grouping = group(trace.module, flows[True], flows[False], flops)
        chain = cls.__new__(cls)
        while True:
            bad = _first_bad_boundary(flows, grouping)
            if bad is None:
                break
            grouping = Grouping(
                grouping.names[: bad + 1] + grouping.names[bad + 2 :],
                grouping.boundaries[:bad] + grouping.boundaries[bad + 1 :],
            )
        chain.__init__(trace, flows, grouping, flops)  # type: ignore[misc]
        return chain

    def cut(self, index: int, training: bool = True) -> list[CutValue]:
        """The tensors that cross the cut between ``layers[index - 1]`` and ``layers[index]``.

        Index 0 gives the module's inputs, ``len(layers)`` its outputs.
        """
        flow = self._flows[training]
        return [flow.cut_value(name) for name in self._cuts[training][index]]

    def program(self, first: int, last: int) -> StageProgram:
        """The program of ``layers[first:last]``, for both modes; it passes values through if there are none.

        Raises:
            IndexError: If there are no such layers.
        """
        count = len(self._edges[True]) - 1
        if not 0 <= first <= last <= count:
            raise IndexError(f"layers {first} to {last} of {count}")
        modes: dict[bool, ModeProgram] = {}
        for training, flow in self._flows.items():
            edges, cuts = self._edges[training], self._cuts[training]
            modes[training] = cut_out(flow, edges[first], edges[last], cuts[first], cuts[last])
        return self._assemble([layer.name for layer in self.layers[first:last]], modes)

    @property
    def batch(self) -> int:
        """The batch size as traced: the first dimension of the first input that has any."""
        return next((value.shape[0] for value in self.cut(0) if value.shape), 1)

    @property
    def batch_dependent(self) -> bool:
        """Whether a sample's result depends on the rest of its batch in train mode, as with BatchNorm."""
        flow = self._flows[True]
        return any(
            node.op == "aten.batch_norm.default" and bound["training"]
            for node, bound in zip(flow.nodes, flow.bound, strict=True)
        )

    def _lay_out(self, grouping: Grouping) -> None:
        """Decide what crosses each cut: from the last to the first, so that every run of layers finds what it needs."""
        for training, flow in self._flows.items():
            edges, cuts = lay_out(flow, grouping.boundaries, training)
            self._edges[training], self._cuts[training] = edges, cuts

    def _assemble(self, layers: list[str], modes: dict[bool, ModeProgram]) -> StageProgram:
        parameters: dict[str, ParameterInfo] = {}
        buffers: dict[str, BufferInfo] = {}
        constants: dict[str, Tensor] = {}
        for mode in modes.values():
            for ref in (ref for node in mode.nodes for ref in node.refs()):
                if ref.kind == "parameter" and ref.name not in parameters:
                    parameter = self._trace.parameters[ref.name]
                    shape = tuple(parameter.shape)
                    parameters[ref.name] = ParameterInfo(shape, parameter.dtype, parameter.requires_grad)
                elif ref.kind == "buffer" and ref.name not in buffers:
                    buffer = self._trace.buffers[ref.name]
                    persistent = ref.name in self._trace.persistent
                    buffers[ref.name] = BufferInfo(tuple(buffer.shape), buffer.dtype, persistent)
                elif ref.kind == "constant":
                    constants[ref.name] = self._trace.constants[ref.name]
        infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in constants.items()}
        program = StageProgram(layers, parameters, buffers, infos, modes[True], modes[False], constants)
        program.check()
        return program


def lay_out(flow: Flow, boundaries: list[Boundary], training: bool) -> tuple[list[int], list[list[str]]]:
    """Positions of all cuts, both ends included, and what crosses each."""
    edges = [0, *(b.train if training else b.eval for b in boundaries), len(flow.nodes)]
    cuts = [list(flow.outputs)]
    for first, last in reversed(list(pairwise(edges[1:]))):
        cuts.insert(0, flow.cheapest(needed_before(flow, first, last, cuts[0])))
    cuts.insert(0, list(flow.inputs))
    return edges, cuts


def _first_bad_boundary(flows: dict[bool, Flow], grouping: Grouping) -> int | None:
    """Index of the first boundary behind which a size is missing."""
    for training, flow in flows.items():
        edges, cuts = lay_out(flow, grouping.boundaries, training)
        for index in range(1, len(edges) - 1):
            if not is_sliceable(flow, edges[index], edges[index + 1], cuts[index], cuts[index + 1]):
                return index - 1
    return None
