"""An exported program in this package's own terms: nodes, and what is known of every value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from lightning_accept.graph.capture import PREFIX
from lightning_accept.graph.encoding import DTYPES
from lightning_accept.graph.errors import TraceError
from lightning_accept.graph.ops import GETITEM, SIZE_FUNCTIONS, Kind, check_call, get_op
from lightning_accept.graph.values import STAGE_DEVICE, Autocast, Node, Ref, map_refs

Size: TypeAlias = Any
"""A size: an int, or a sympy expression where it may vary."""


@dataclass(frozen=True)
class Value:
    """What is known of one value.

    Attributes:
        kind: Tensor, sequence of tensors, or size.
        shape: Sizes as traced (empty for other kinds).
        sizes: The same with symbols for what may vary.
        dtype: None for other kinds.
    """

    kind: Kind
    shape: tuple[int, ...] = ()
    sizes: tuple[Size, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes, as traced."""
        count = self.dtype.itemsize if self.dtype is not None else 0
        for size in self.shape:
            count *= size
        return count

    @property
    def dynamic(self) -> tuple[int, ...]:
        """Dimensions that may vary."""
        return tuple(dim for dim, size in enumerate(self.sizes) if not isinstance(size, int))


@dataclass
class Graph:
    """One mode of a module.

    Attributes:
        inputs: Names of the module's tensor inputs, in order.
        nodes: Operations in order, size arithmetic included.
        outputs: References to the module's tensor outputs, in order; repeated where the module returns one twice.
        values: What is known of each value, and of each parameter, buffer and constant by its reference.
        paths: For each node the modules it runs in, outermost (the module itself, ``""``) first.
        lines: For each node the user's line, for messages.
        constants: Tensors held by the module's code, by name.
        sizes: For each size, its symbolic expression.
        hints: For each size, its value as traced.
        ranges: For each symbol, the least and greatest size that the graph holds for (None: no limit).
    """

    inputs: list[str]
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    values: dict[Ref, Value] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)
    hints: dict[str, int | float | bool] = field(default_factory=dict)
    ranges: dict[sympy.Symbol, tuple[int, int | None]] = field(default_factory=dict)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_DROPPED = frozenset(
    f"aten.{name}.default"
    for name in (
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    )
) | {"aten._assert_async.msg"}
_FUNCTION_NAMES = {function: name for name, (function, _) in SIZE_FUNCTIONS.items()} | {
    torch.sym_float: "torch.sym_float",
    torch.sym_int: "torch.sym_int",
    torch.sym_ite: "torch.sym_ite",
    torch.sym_max: "torch.sym_max",
    torch.sym_min: "torch.sym_min",
    torch.sym_not: "torch.sym_not",
}


def translate(
    program: ExportedProgram,
    module: nn.Module,
    parameters: Mapping[int, str],
    buffers: Mapping[int, str],
    mode: str,
) -> Graph:
    """Translate ``program``.

    Args:
        program: The exported program.
        module: The module that was exported.
        parameters: Canonical names of the module's parameters by ``id``.
        buffers: Likewise for the buffers.
        mode: ``train`` or ``eval``; names the constants.

    Raises:
        TraceError: If it holds an operation that a stage program may not contain.
    """
    return _Translator(program, module, parameters, buffers, mode).run()


class _Translator:
    def __init__(
        self,
        program: ExportedProgram,
        module: nn.Module,
        parameters: Mapping[int, str],
        buffers: Mapping[int, str],
        mode: str,
    ) -> None:
        self.program = program
        self.module = module
        self.parameters = parameters
        self.buffers = buffers
        self.mode = mode
        self.graph = Graph([])
        self.names: set[str] = set()

    def run(self) -> Graph:
        env: dict[fx.Node, Any] = {}
        nodes = list(self.program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            ref = self.placeholder(node, spec.kind, spec.target or "")
            env[node] = ref
            self.graph.values[ref] = self.describe(node, "tensor")
        outputs = self.body(nodes, env, None, None, ())
        self.graph.outputs = [self.tensor_output(value) for value in outputs]
        for symbol, bounds in self.program.range_constraints.items():
            upper = int(bounds.upper) if bounds.upper.is_Integer else None
            self.graph.ranges[symbol] = (int(bounds.lower), upper)
        return self.graph

    def placeholder(self, node: fx.Node, kind: InputKind, target: str) -> Ref:
        if kind == InputKind.USER_INPUT:
            self.graph.inputs.append(self.unique(node.name))
            return Ref("value", self.graph.inputs[-1])
        path = target.removeprefix(PREFIX)
        if kind == InputKind.PARAMETER:
            return Ref("parameter", self.parameters[id(_attribute(self.module, path))])
        if kind == InputKind.BUFFER:
            return Ref("buffer", self.buffers[id(_attribute(self.module, path))])
        if kind == InputKind.CONSTANT_TENSOR:
            name = f"{self.mode}:{path}"
            self.graph.constants[name] = self.program.constants[target].detach()
            return Ref("constant", name)
        raise TraceError(f"the pipelined module holds {target!r}, which is not a tensor; move it out of forward")

    def body(
        self,
        nodes: list[fx.Node],
        env: dict[fx.Node, Any],
        grad: bool | None,
        autocast: Autocast | None,
        path: tuple[str, ...],
    ) -> list[Any]:
        """Translate one graph; returns what it outputs."""
        for node in nodes:
            if node.op == "output":
                outputs: Any = node.args[0]
                return [self.argument(value, env) for value in outputs]
            if node.op == "get_attr":
                env[node] = getattr(node.graph.owning_module, str(node.target))
            if node.op != "call_function":
                continue
            path = _path(node) or path
            target = node.target
            item: Any = node
            if isinstance(target, torch._ops.HigherOrderOperator):
                env[node] = self.region(node, env, grad, autocast, path)
            elif target is _getitem and isinstance(env.get(item.args[0]), list):
                env[node] = env[item.args[0]][item.args[1]]
            else:
                self.call(node, env, grad, autocast, path)
        raise TraceError("the exporter returned a graph without output")

    def region(
        self,
        node: fx.Node,
        env: dict[fx.Node, Any],
        grad: bool | None,
        autocast: Autocast | None,
        path: tuple[str, ...],
    ) -> list[Any]:
        """A block under another grad mode or autocast: its nodes become part of the graph, marked."""
        name = str(node.target)
        args: list[Any] = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            grad = bool(args.pop(0))
        elif name == "wrap_with_autocast":
            _, dtype, enabled, _ = (args.pop(0) for _ in range(4))
            autocast = Autocast(dtype or torch.bfloat16, bool(enabled))
        else:
            raise TraceError(
                f"the pipelined module uses {name}, which cannot run on another machine{_line(node)}\n"
                "Replace it, or pipeline a submodule without it (AccEPTStrategy(module=...))."
            )
        block = env[args.pop(0)]
        inner: dict[fx.Node, Any] = {}
        nodes = list(block.graph.nodes)
        placeholders = [item for item in nodes if item.op == "placeholder"]
        for item, value in zip(placeholders, args, strict=True):
            inner[item] = self.argument(value, env)
        return self.body(nodes, inner, grad, autocast, path)

    def call(
        self,
        node: fx.Node,
        env: dict[fx.Node, Any],
        grad: bool | None,
        autocast: Autocast | None,
        path: tuple[str, ...],
    ) -> None:
        op_name = _op_name(node.target)
        if op_name in _DROPPED:
            return
        try:
            op = get_op(op_name)
        except ValueError as error:
            raise TraceError(
                f"the pipelined module uses {op_name}, which stage programs do not support{_line(node)}\n"
                "Replace it by ordinary PyTorch operations, or pipeline a submodule without it "
                "(AccEPTStrategy(module=...))."
            ) from error
        args = tuple(self.argument(value, env) for value in node.args)
        kwargs = {name: self.argument(value, env) for name, value in node.kwargs.items()}
        if kwargs.get("pin_memory") is not None:
            del kwargs["pin_memory"]
        result = Node(self.unique(node.name), op_name, args, kwargs, grad, autocast)
        try:
            check_call(op, args, kwargs, lambda ref: self.graph.values[ref].kind)
        except ValueError as error:
            raise TraceError(f"the exported call cannot be written down: {error}{_line(node)}") from error
        ref = Ref("value", result.name)
        env[node] = ref
        self.graph.nodes.append(result)
        self.graph.values[ref] = self.describe(node, op.kind)
        self.graph.paths[result.name] = path or ("",)
        self.graph.lines[result.name] = _line(node)
        if op.kind == "size":
            value = node.meta["val"]
            self.graph.sizes[result.name] = size_of(value)
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            self.graph.hints[result.name] = value.node.hint if symbolic else value

    def argument(self, value: Any, env: dict[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return env[value]
        if isinstance(value, list | tuple):
            return [self.argument(item, env) for item in value]
        if isinstance(value, torch.device):
            return STAGE_DEVICE
        if isinstance(value, torch.SymInt):
            return int(value)
        return value

    def describe(self, node: fx.Node, kind: Kind) -> Value:
        value = node.meta.get("val")
        if kind != "tensor":
            return Value(kind)
        if not isinstance(value, Tensor):
            raise TraceError(f"the exporter does not say what {node.name} is{_line(node)}")
        if value.dtype not in DTYPES.values():
            raise TraceError(f"tensors of {value.dtype} cannot cross to another machine{_line(node)}")
        sizes = tuple(size_of(size) for size in value.shape)
        shape = tuple(_hint(size, node) for size in value.shape)
        return Value(kind, shape, sizes, value.dtype)

    def tensor_output(self, value: Any) -> Ref:
        if not isinstance(value, Ref):
            raise TraceError(f"the pipelined module returns {value!r}, which the exporter does not follow")
        return value

    def unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}.{count}"
        self.names.add(candidate)
        return candidate


_getitem = get_op(GETITEM).function


def share_constants(graphs: Iterable[Graph]) -> dict[str, Tensor]:
    """Give equal constants of all graphs one name; returns them by that name."""
    shared: dict[str, Tensor] = {}
    for graph in graphs:
        renamed: dict[Ref, Ref] = {}
        for name, tensor in graph.constants.items():
            same = (
                known
                for known, other in shared.items()
                if other.dtype == tensor.dtype and other.shape == tensor.shape and torch.equal(other, tensor)
            )
            chosen = next(same, f"constant:{len(shared)}")
            shared.setdefault(chosen, tensor.clone())
            renamed[Ref("constant", name)] = Ref("constant", chosen)
        graph.nodes = [_rename(node, renamed) for node in graph.nodes]
        graph.outputs = [renamed.get(ref, ref) for ref in graph.outputs]
        graph.values.update((new, graph.values[old]) for old, new in renamed.items())
        graph.constants = {ref.name: shared[ref.name] for ref in renamed.values()}
    return shared


def _rename(node: Node, renamed: Mapping[Ref, Ref]) -> Node:
    def change(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    kwargs = {name: map_refs(value, change) for name, value in node.kwargs.items()}
    return replace(node, args=map_refs(node.args, change), kwargs=kwargs)


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target is _getitem:
        return GETITEM
    name = getattr(target, "__name__", str(target))
    known = "math.sqrt" if name in ("sym_sqrt", "_sym_sqrt") else _FUNCTION_NAMES.get(target)
    return known if known is not None else f"{getattr(target, '__module__', '')}.{name}"


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _path(node: fx.Node) -> tuple[str, ...]:
    """The modules a node runs in, by dotted path relative to the exported module."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = []
    for name, _ in stack.values():
        name = name.split("@")[0]
        if name == PREFIX[:-1]:
            paths.append("")
        elif name.startswith(PREFIX):
            paths.append(name.removeprefix(PREFIX))
    return tuple(paths)


def size_of(value: Any) -> Size:
    """A size as the exporter gives it: an int where it is fixed, else its symbolic expression."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        expression = value.node.expr
        if expression.is_Integer:
            return int(expression)
        return expression
    return int(value)


def _hint(value: Any, node: fx.Node) -> int:
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        if hint is None:
            raise TraceError(
                "the size of a tensor depends on the values of another (as with nonzero or boolean indexing), so it "
                f"cannot be planned; move that out of the pipelined module{_line(node)}"
            )
        return int(hint)
    return int(value)


def _line(node: fx.Node) -> str:
    """The user's own line that a node came from, as the end of a message."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    code = [line.strip() for line in trace.splitlines() if not line.strip().startswith("File ")]
    pairs = list(zip(frames, code, strict=False))
    pairs = [pair for pair in pairs if _HERE not in pair[0]]
    own = [pair for pair in pairs if _TORCH not in pair[0]] or pairs
    if not own:
        return ""
    place = re.sub(r'^File "(.*)", line (\d+), in (.*)$', r"\1:\2, in \3", own[-1][0])
    return f"\n  {place}: {own[-1][1]}"
