"""Tracing: an ordinary module becomes a graph for train mode and one for eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accept.graph.capture import Capture, capture, undisturbed
from lightning_accept.graph.errors import TraceError
from lightning_accept.graph.structure import InputStructure, OutputStructure, split_inputs
from lightning_accept.graph.traced import Graph, Size, share_constants, size_of, translate
from lightning_accept.graph.values import Ref


class Trace:
    """A module traced in train and eval mode for one form of its arguments.

    Attributes:
        module: The module itself.
        parameters: The module's own parameters that forward reaches, by canonical name (a shared one once).
        buffers: The module's own buffers that forward reaches, by canonical name.
        constants: Tensors held by the module's code, equal ones of both modes once.
        graphs: The graph per mode, True for train.
        structure: How the arguments nest.
        shapes: Sizes of the tensors among the arguments, as traced.
        dynamic: For each of them, the dimensions that may vary.
    """

    def __init__(
        self,
        module: nn.Module,
        structure: InputStructure,
        examples: Sequence[Tensor],
        dynamic: Sequence[frozenset[int]],
        flags: dict[bool, frozenset[str]],
        captures: dict[bool, Capture],
    ) -> None:
        self.module = module
        self.structure = structure
        self.shapes = [tuple(example.shape) for example in examples]
        self.dtypes = [example.dtype for example in examples]
        self.dynamic = list(dynamic)
        self.flags = flags
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        buffer_names = {id(buffer): name for name, buffer in module.named_buffers()}
        self.graphs: dict[bool, Graph] = {}
        self._structures: dict[bool, OutputStructure] = {}
        for training, result in captures.items():
            mode = "train" if training else "eval"
            self.graphs[training] = translate(result.program, module, names, buffer_names, mode)
            self._structures[training] = result.output
        self.constants: dict[str, Tensor] = share_constants(self.graphs.values())
        used = {ref for graph in self.graphs.values() for ref in _stored(graph)}
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in module.named_parameters() if Ref("parameter", name) in used
        }
        self.buffers: dict[str, Tensor] = {
            name: buffer for name, buffer in module.named_buffers() if Ref("buffer", name) in used
        }
        self.persistent: frozenset[str] = frozenset(module.state_dict(keep_vars=True)) & frozenset(self.buffers)

    def accepts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the trace holds for these arguments."""
        return self._mismatch(args, kwargs) is None

    def describe_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why :meth:`accepts` says no, in words; empty if it says yes."""
        return self._mismatch(args, kwargs) or ""

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors among the arguments, in the order of the first stage's inputs."""
        return split_inputs(args, kwargs)[1]

    def unflatten(self, outputs: Sequence[Tensor], training: bool) -> Any:
        """The module's output from the last stage's outputs: its structure, its constants, shared tensors shared."""
        order = self.output_names(training)
        by_name = dict(zip(order, outputs, strict=True))
        return self._structures[training].rebuild([by_name[ref] for ref in self.graphs[training].outputs])

    def output_names(self, training: bool) -> list[Ref]:
        """The distinct tensors that the module returns, in order."""
        return list(dict.fromkeys(self.graphs[training].outputs))

    def _mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        structure, tensors = split_inputs(args, kwargs)
        difference = self.structure.difference(structure)
        if difference is not None:
            return difference
        for path, tensor, dtype, shape, dynamic in zip(
            structure.paths, tensors, self.dtypes, self.shapes, self.dynamic, strict=True
        ):
            if tensor.dtype != dtype:
                return f"{path} was traced with {dtype} and is now {tensor.dtype}"
            if tensor.dim() != len(shape):
                return f"{path} was traced with {len(shape)} dimensions and now has {tensor.dim()}"
            for dim, (old, new) in enumerate(zip(shape, tensor.shape, strict=True)):
                if old != new and dim not in dynamic:
                    return f"{path} was traced with size {old} in dimension {dim} and now has {new}"
        for graph in self.graphs.values():
            reason = _size_conflict(graph, tensors, structure.paths)
            if reason is not None:
                return reason
        if _flags(self.module) != self.flags[self.module.training]:
            return "the train or eval flags of its submodules have changed"
        return None


def _size_conflict(graph: Graph, tensors: Sequence[Tensor], paths: Sequence[str]) -> str | None:
    """Whether sizes break what the exporter assumed about them: relations among inputs and ranges."""
    known: dict[Size, int] = {}
    for name, tensor, path in zip(graph.inputs, tensors, paths, strict=True):
        for dim, size in enumerate(graph.values[Ref("value", name)].sizes):
            if isinstance(size, int):
                continue
            actual = tensor.shape[dim]
            if known.setdefault(size, actual) != actual:
                return f"{path} has size {actual} in dimension {dim}, where another argument has {known[size]}"
            if size.is_Symbol:
                lower, upper = graph.ranges.get(size, (0, None))
                # Every dynamic size was traced as at least 2; a batch of 1 is served by the same graph.
                if (lower > 2 and actual < lower) or (upper is not None and actual > upper):
                    return f"{path} has size {actual} in dimension {dim}, outside the range it was traced for"
            else:
                symbols = sorted(size.free_symbols, key=str)
                linear = size.as_poly(*symbols) if len(symbols) == 1 else None
                if linear is not None and linear.degree() == 1:
                    factor, offset = (int(value) for value in linear.all_coeffs())
                    if (actual - offset) % factor:
                        return f"{path} has size {actual} in dimension {dim}, which must be {size}"
    return None


def _stored(graph: Graph) -> Iterator[Ref]:
    for node in graph.nodes:
        yield from (ref for ref in node.refs() if ref.kind != "value")
    yield from (ref for ref in graph.outputs if ref.kind != "value")


def _flags(module: nn.Module) -> frozenset[str]:
    """Names of the submodules whose training flag differs from the module's."""
    return frozenset(name for name, child in module.named_modules() if child.training != module.training)


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    previous: Trace | None = None,
) -> Trace:
    """Trace ``module`` in train and in eval mode, whatever mode it is in, and leave it as it was.

    Dimension 0 of the tensors is dynamic where it is the batch size, and so is every dimension that was dynamic in
    ``previous`` or whose size differs from it. Where submodules are in another mode than the module (a frozen
    BatchNorm), that is kept for the mode the module is in.

    Args:
        module: The module; its forward is called with fake tensors, hooks included.
        args: Positional arguments of one real call.
        kwargs: Its keyword arguments.
        previous: The trace that did not accept these arguments, if there is one.

    Raises:
        TraceError: If the module cannot be exported; with the reason, the user's own line and what to change.
    """
    structure, tensors = split_inputs(args, kwargs)
    if not tensors:
        raise TraceError("the pipelined module is called without a tensor; pass its input as a tensor argument")
    with _clean_context(), undisturbed(module):
        plain = [tensor.detach().clone() for tensor in tensors]
        wanted = _dynamic_dims(plain, structure, previous)
        examples = _enlarged(plain, wanted, previous)
        flags: dict[bool, frozenset[str]] = {}
        captures: dict[bool, Capture] = {}
        for training in (True, False):
            _set_mode(module, training, previous)
            flags[training] = _flags(module)
            captures[training] = capture(module, structure, examples, wanted)
        held = _held_dims(captures, wanted)
        if any(
            example.shape[dim] != tensor.shape[dim]
            for example, tensor, before, after in zip(examples, plain, wanted, held, strict=True)
            for dim in before - after
        ):
            # A size of 1 was traced as 2, but the module insists on one size: then it has to be the real one.
            for training in (True, False):
                _set_mode(module, training, previous)
                captures[training] = capture(module, structure, plain, [frozenset()] * len(plain))
            examples, held = plain, [frozenset()] * len(plain)
        return Trace(module, structure, examples, held, flags, captures)


@contextmanager
def _clean_context() -> Iterator[None]:
    """Neither inference mode, nor no_grad, nor autocast, whatever the caller runs under."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _set_mode(module: nn.Module, training: bool, previous: Trace | None) -> None:
    """Put the module in a mode; keep mixed flags where it is in that mode already or was traced with them."""
    if module.training == training:
        return
    module.train(training)
    if previous is not None and previous.module is module:
        for name, child in module.named_modules():
            child.training = (not training) if name in previous.flags[training] else training


def _dynamic_dims(tensors: Sequence[Tensor], structure: InputStructure, previous: Trace | None) -> list[frozenset[int]]:
    sizes = [tensor.shape[0] for tensor in tensors if tensor.dim() > 0]
    batch = sizes[0] if sizes else 0
    if 0 in sizes:
        raise TraceError("the batch is empty; the pipelined module cannot be traced on it")
    dims = [{0} if tensor.dim() > 0 and tensor.shape[0] == batch else set() for tensor in tensors]
    if previous is not None and previous.structure.spec == structure.spec and len(previous.shapes) == len(tensors):
        for tensor, chosen, shape, dynamic in zip(tensors, dims, previous.shapes, previous.dynamic, strict=True):
            if len(shape) != tensor.dim():
                continue
            varying = {dim for dim in range(tensor.dim()) if shape[dim] != tensor.shape[dim] or dim in dynamic}
            # A first dimension of 1 beside a larger batch is one row for all, not a batch.
            chosen |= {dim for dim in varying if dim > 0 or tensor.shape[0] > 1 or batch == 1}
    return [frozenset(chosen) for chosen in dims]


def _enlarged(tensors: Sequence[Tensor], dynamic: Sequence[frozenset[int]], previous: Trace | None) -> list[Tensor]:
    """Repeat tensors along dynamic dimensions of size 1, which the exporter would take as fixed."""
    examples = []
    for position, (tensor, dims) in enumerate(zip(tensors, dynamic, strict=True)):
        for dim in sorted(dims):
            if tensor.shape[dim] == 1:
                known = previous.shapes[position][dim] if previous is not None and dim > 0 else 0
                tensor = torch.cat([tensor] * max(known, 2), dim)
        examples.append(tensor)
    return examples


def _held_dims(captures: dict[bool, Capture], wanted: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Of the wanted dimensions, those that the exporter kept dynamic in both modes."""
    held = [set(dims) for dims in wanted]
    for result in captures.values():
        names = result.program.graph_signature.user_inputs
        by_name = {node.name: node for node in result.program.graph.nodes if node.op == "placeholder"}
        for name, dims in zip(names, held, strict=True):
            shape = by_name[str(name)].meta["val"].shape
            dims -= {dim for dim in dims if isinstance(size_of(shape[dim]), int)}
    return [frozenset(dims) for dims in held]
