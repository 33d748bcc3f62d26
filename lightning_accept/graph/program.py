"""A stage program: what a stage computes, as data, and its JSON form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_accept.graph.encoding import DTYPES, decode_value, encode_value
from lightning_accept.graph.errors import ProgramError
from lightning_accept.graph.ops import GETITEM, Kind, check_call, draws, get_op
from lightning_accept.graph.sharing import memory_roots, overwritten_memory
from lightning_accept.graph.values import Autocast, Node, Ref

FORMAT = "lightning-accept stage program"
VERSION = 1
_MAX_NAME = 1000


@dataclass(frozen=True)
class CutValue:
    """One tensor that crosses a cut.

    Attributes:
        name: Unique among the values of its mode (train or eval).
        shape: As traced; the batch dimension with the size it had then.
        dtype: Its dtype, as traced without autocast.
        dynamic: Positions in ``shape`` that may differ from run to run.
        differentiable: Whether a gradient can flow back through it: floating, and reached from a parameter or from
            a floating input of the module.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dynamic: tuple[int, ...] = ()
    differentiable: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes, as traced."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def floating(self) -> bool:
        """Whether the dtype is a floating one."""
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class TensorInfo:
    """What a program says of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterInfo(TensorInfo):
    """A parameter."""

    requires_grad: bool = True


@dataclass(frozen=True)
class BufferInfo(TensorInfo):
    """A buffer; ``persistent`` says whether it belongs to the module's state dict."""

    persistent: bool = True


@dataclass(frozen=True)
class ModeProgram:
    """The part of a program that runs in one mode: inputs in order, nodes in order, names of the outputs."""

    inputs: tuple[CutValue, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StageProgram:
    """What one stage computes: plain data over an allow-list of operations. Building or reading it runs nothing.

    Attributes:
        layers: Names of the layers in it.
        parameters: Shape, dtype and ``requires_grad`` of every parameter it uses, by canonical name.
        buffers: Shape, dtype and persistence of every buffer it uses, by canonical name.
        constant_infos: Shape and dtype of every tensor that the module's code holds as a constant.
        train: What runs in train mode.
        eval: What runs in eval mode.
        constants: The constants themselves; they travel beside the JSON.
    """

    layers: list[str]
    parameters: dict[str, ParameterInfo]
    buffers: dict[str, BufferInfo]
    constant_infos: dict[str, TensorInfo]
    train: ModeProgram
    eval: ModeProgram
    constants: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def mode(self, training: bool) -> ModeProgram:
        """The part for train or eval mode."""
        return self.train if training else self.eval

    def random(self, training: bool) -> bool:
        """Whether a run in this mode draws random numbers."""
        return any(
            draws(op, op.bind(node.args, node.kwargs))
            for node in self.mode(training).nodes
            if (op := get_op(node.op)).seeded
        )

    def changing_buffers(self) -> list[str]:
        """Names of the buffers that a run in train mode overwrites, such as BatchNorm's statistics."""
        nodes = self.train.nodes
        bound = [get_op(node.op).bind(node.args, node.kwargs) for node in nodes]
        written = overwritten_memory(nodes, bound, memory_roots(nodes, bound))
        return [name for name in self.buffers if Ref("buffer", name) in written]

    def tensors(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors that the program needs, picked from the module's: parameters, buffers and constants by name.

        Raises:
            ProgramError: If one is missing.
        """
        chosen = {name: _pick(parameters, name, "parameter") for name in self.parameters}
        chosen.update((name, _pick(buffers, name, "buffer")) for name in self.buffers)
        chosen.update((name, _pick(self.constants, name, "constant")) for name in self.constant_infos)
        return chosen

    def to_json(self) -> str:
        """The program as JSON, without its constants."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "layers": self.layers,
                "parameters": {
                    name: {**_info_to_json(info), "requires_grad": info.requires_grad}
                    for name, info in self.parameters.items()
                },
                "buffers": {
                    name: {**_info_to_json(info), "persistent": info.persistent} for name, info in self.buffers.items()
                },
                "constants": {name: _info_to_json(info) for name, info in self.constant_infos.items()},
                "train": _mode_to_json(self.train),
                "eval": _mode_to_json(self.eval),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str | bytes, constants: Mapping[str, Tensor] | None = None) -> StageProgram:
        """Read and check a program.

        Args:
            text: What :meth:`to_json` wrote.
            constants: The tensors of the constants, where they are at hand already.

        Raises:
            ProgramError: If the text is not a valid program of this version.
        """
        try:
            data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
            program = _program_from_json(cls, data)
        except ProgramError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ProgramError(f"not a stage program: {type(error).__name__}: {error}") from error
        if constants is not None:
            program.constants.update((name, _pick(constants, name, "constant")) for name in program.constant_infos)
        return program

    def check(self) -> None:
        """Check every call, reference and name.

        Raises:
            ProgramError: If anything is odd.
        """
        stored = {
            "parameter": set(self.parameters),
            "buffer": set(self.buffers),
            "constant": set(self.constant_infos),
        }
        for label, mode in (("train", self.train), ("eval", self.eval)):
            try:
                _check_mode(mode, stored)
            except ValueError as error:
                raise ProgramError(f"{label} part of the stage program: {error}") from error


def _pick(tensors: Mapping[str, Tensor], name: str, what: str) -> Tensor:
    if name not in tensors:
        raise ProgramError(f"the stage program needs the {what} {name!r}, which is not among the tensors given")
    return tensors[name]


def _check_mode(mode: ModeProgram, stored: Mapping[str, set[str]]) -> None:
    kinds: dict[str, Kind] = {}
    lengths: dict[str, int | None] = {}

    def kind_of(ref: Ref) -> Kind:
        if ref.kind == "value":
            if ref.name not in kinds:
                raise ValueError(f"{ref} is used before it is computed, or never computed")
            return kinds[ref.name]
        if ref.name not in stored[ref.kind]:
            raise ValueError(f"{ref} is not declared")
        return "tensor"

    for value in mode.inputs:
        if value.name in kinds:
            raise ValueError(f"the input {value.name!r} appears twice")
        kinds[value.name] = "tensor"
    for node in mode.nodes:
        if node.name in kinds:
            raise ValueError(f"the name {node.name!r} is given twice")
        op = get_op(node.op)
        for ref in node.refs():
            kind_of(ref)
        check_call(op, node.args, node.kwargs, kind_of)
        if op.name == GETITEM:
            sequence, index = op.bind(node.args, node.kwargs).values()
            length = lengths.get(sequence.name)
            if length is not None and index >= length:
                raise ValueError(f"{node.name!r} takes item {index} of {length}")
        kinds[node.name] = op.kind
        lengths[node.name] = op.returns
    for name in mode.outputs:
        if kinds.get(name) != "tensor":
            raise ValueError(f"the output {name!r} is not a tensor computed or received here")


def _info_to_json(info: TensorInfo) -> dict[str, Any]:
    return {"shape": list(info.shape), "dtype": encode_value(info.dtype)["dtype"]}


def _mode_to_json(mode: ModeProgram) -> dict[str, Any]:
    return {
        "inputs": [
            {
                "name": value.name,
                "shape": list(value.shape),
                "dtype": encode_value(value.dtype)["dtype"],
                "dynamic": list(value.dynamic),
                "differentiable": value.differentiable,
            }
            for value in mode.inputs
        ],
        "nodes": [_node_to_json(node) for node in mode.nodes],
        "outputs": list(mode.outputs),
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name, "op": node.op, "args": encode_value(list(node.args))}
    if node.kwargs:
        data["kwargs"] = {name: encode_value(value) for name, value in node.kwargs.items()}
    if node.grad is not None:
        data["grad"] = node.grad
    if node.autocast is not None:
        data["autocast"] = {
            "dtype": encode_value(node.autocast.dtype)["dtype"],
            "enabled": node.autocast.enabled,
        }
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a JSON object repeats a key")
    return data


def _fields(data: Any, what: str, required: Mapping[str, type], optional: Mapping[str, type] | None = None) -> Any:
    """``data`` if it is an object with these keys and types, and no others."""
    optional = optional or {}
    if type(data) is not dict:
        raise ProgramError(f"{what} must be an object")
    for name, wanted in required.items():
        if name not in data:
            raise ProgramError(f"{what} lacks {name!r}")
        if type(data[name]) is not wanted:
            raise ProgramError(f"{name!r} of {what} must be a {wanted.__name__}")
    for name in data:
        if name in required:
            continue
        if name not in optional:
            raise ProgramError(f"{what} has an unknown key {name!r}")
        if type(data[name]) is not optional[name]:
            raise ProgramError(f"{name!r} of {what} must be a {optional[name].__name__}")
    return data


def _name(value: Any, what: str) -> str:
    if type(value) is not str or not 0 < len(value) <= _MAX_NAME or not re.fullmatch(r"[^\x00-\x1f\x7f]+", value):
        raise ProgramError(f"{what} must be a non-empty printable string of at most {_MAX_NAME} characters")
    return value


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not list or not all(type(size) is int and size >= 0 for size in value):
        raise ProgramError(f"{what} must be a list of sizes")
    return tuple(value)


def _dtype(value: Any) -> torch.dtype:
    if type(value) is not str or value not in DTYPES:
        raise ProgramError(f"unknown dtype {value!r}")
    return DTYPES[value]


def _program_from_json(cls: type[StageProgram], data: Any) -> StageProgram:
    _fields(
        data,
        "the program",
        {
            "format": str,
            "version": int,
            "layers": list,
            "parameters": dict,
            "buffers": dict,
            "constants": dict,
            "train": dict,
            "eval": dict,
        },
    )
    if data["format"] != FORMAT:
        raise ProgramError(f"not a stage program: its format is {data['format']!r}")
    if data["version"] != VERSION:
        raise ProgramError(
            f"the stage program has version {data['version']}, this machine reads version {VERSION}; "
            "install the same version of lightning-accept on all machines"
        )
    layers = [_name(layer, "a layer's name") for layer in data["layers"]]
    if len(set(layers)) != len(layers):
        raise ProgramError("a layer appears twice")
    parameters: dict[str, ParameterInfo] = {}
    for name, info in data["parameters"].items():
        _fields(info, f"parameter {name!r}", {"shape": list, "dtype": str, "requires_grad": bool})
        shape = _sizes(info["shape"], f"the shape of {name!r}")
        parameters[_name(name, "a name")] = ParameterInfo(shape, _dtype(info["dtype"]), info["requires_grad"])
    buffers: dict[str, BufferInfo] = {}
    for name, info in data["buffers"].items():
        _fields(info, f"buffer {name!r}", {"shape": list, "dtype": str, "persistent": bool})
        shape = _sizes(info["shape"], f"the shape of {name!r}")
        buffers[_name(name, "a name")] = BufferInfo(shape, _dtype(info["dtype"]), info["persistent"])
    constants: dict[str, TensorInfo] = {}
    for name, info in data["constants"].items():
        _fields(info, f"constant {name!r}", {"shape": list, "dtype": str})
        shape = _sizes(info["shape"], f"the shape of {name!r}")
        constants[_name(name, "a name")] = TensorInfo(shape, _dtype(info["dtype"]))
    if len({*parameters, *buffers, *constants}) != len(parameters) + len(buffers) + len(constants):
        raise ProgramError("parameters, buffers and constants must have different names")
    train, evaluation = _mode_from_json(data["train"]), _mode_from_json(data["eval"])
    program = cls(layers, parameters, buffers, constants, train, evaluation)
    program.check()
    return program


def _mode_from_json(data: Any) -> ModeProgram:
    _fields(data, "a mode", {"inputs": list, "nodes": list, "outputs": list})
    inputs = []
    for value in data["inputs"]:
        _fields(value, "an input", {"name": str, "shape": list, "dtype": str, "dynamic": list, "differentiable": bool})
        shape = _sizes(value["shape"], "an input's shape")
        dynamic = _sizes(value["dynamic"], "an input's dynamic dimensions")
        if any(dim >= len(shape) for dim in dynamic):
            raise ProgramError("an input's dynamic dimension is out of range")
        name = _name(value["name"], "an input's name")
        inputs.append(CutValue(name, shape, _dtype(value["dtype"]), dynamic, value["differentiable"]))
    nodes = tuple(_node_from_json(node) for node in data["nodes"])
    return ModeProgram(tuple(inputs), nodes, tuple(_name(name, "an output's name") for name in data["outputs"]))


def _node_from_json(data: Any) -> Node:
    _fields(data, "a node", {"name": str, "op": str, "args": list}, {"kwargs": dict, "grad": bool, "autocast": dict})
    autocast = None
    if "autocast" in data:
        region = _fields(data["autocast"], "an autocast region", {"dtype": str, "enabled": bool})
        autocast = Autocast(_dtype(region["dtype"]), region["enabled"])
    return Node(
        _name(data["name"], "a node's name"),
        data["op"],
        tuple(decode_value(value) for value in data["args"]),
        {_name(name, "an argument's name"): decode_value(value) for name, value in data.get("kwargs", {}).items()},
        data.get("grad"),
        autocast,
    )
