"""What a stage needs to know about an operation: its function, its argument types, what it aliases and overwrites."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from lightning_accept.graph.allowed import ATEN_OPS
from lightning_accept.graph.values import STAGE_DEVICE, Ref

Kind = Literal["tensor", "tensors", "size"]
"""What a value is: a tensor, a sequence of tensors, or a Python number derived from sizes."""

SYM_SIZE = "aten.sym_size.int"
GETITEM = "operator.getitem"

SIZE_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "operator.add": (operator.add, 2),
    "operator.sub": (operator.sub, 2),
    "operator.mul": (operator.mul, 2),
    "operator.truediv": (operator.truediv, 2),
    "operator.floordiv": (operator.floordiv, 2),
    "operator.mod": (operator.mod, 2),
    "operator.neg": (operator.neg, 1),
    "operator.abs": (operator.abs, 1),
    "operator.eq": (operator.eq, 2),
    "operator.ne": (operator.ne, 2),
    "operator.lt": (operator.lt, 2),
    "operator.le": (operator.le, 2),
    "operator.gt": (operator.gt, 2),
    "operator.ge": (operator.ge, 2),
    "operator.and_": (operator.and_, 2),
    "operator.or_": (operator.or_, 2),
    "math.ceil": (math.ceil, 1),
    "math.floor": (math.floor, 1),
    "math.trunc": (math.trunc, 1),
    "math.sqrt": (math.sqrt, 1),
    "torch.sym_float": (float, 1),
    "torch.sym_int": (int, 1),
    "torch.sym_ite": (lambda condition, one, other: one if condition else other, 3),
    "torch.sym_max": (max, 2),
    "torch.sym_min": (min, 2),
    "torch.sym_not": (operator.not_, 1),
}
"""Arithmetic on sizes: name to function and number of arguments."""


@dataclass(frozen=True)
class Op:
    """One allowed operation.

    Attributes:
        name: As it stands in a program.
        function: What is called.
        kind: What it returns.
        returns: Number of returned tensors where ``kind`` is ``tensors`` and the number is fixed; else None.
        writes: Names of the arguments that it overwrites by its schema.
        aliases: Names of the arguments whose memory the result may share.
        seeded: Whether it may draw random numbers.
        inplace: Whether it is an in-place op (writes its first argument and returns it).
    """

    name: str
    function: Callable[..., Any]
    kind: Kind
    returns: int | None
    arguments: tuple[Argument, ...]
    writes: frozenset[str] = frozenset()
    aliases: frozenset[str] = frozenset()
    seeded: bool = False
    inplace: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in.

        Raises:
            ValueError: If the call does not fit the schema in number or names of arguments.
        """
        bound: dict[str, Any] = {}
        positional = [argument for argument in self.arguments if not argument.keyword_only]
        if len(args) > len(positional):
            raise ValueError(f"{self.name} takes at most {len(positional)} positional arguments, got {len(args)}")
        for argument, value in zip(positional, args, strict=False):
            bound[argument.name] = value
        names = {argument.name for argument in self.arguments}
        for name, value in kwargs.items():
            if name not in names:
                raise ValueError(f"{self.name} has no argument {name!r}")
            if name in bound:
                raise ValueError(f"{self.name} got its argument {name!r} twice")
            bound[name] = value
        for argument in self.arguments:
            if argument.name not in bound:
                if argument.required:
                    raise ValueError(f"{self.name} lacks its argument {argument.name!r}")
                bound[argument.name] = argument.default
        return bound


@dataclass(frozen=True)
class Argument:
    """One argument of an operation; ``type`` is the schema's type object (None where any size goes)."""

    name: str
    type: Any
    required: bool
    default: Any
    keyword_only: bool


@cache
def get_op(name: str) -> Op:
    """The operation called ``name``.

    Raises:
        ValueError: If it is not on the allow-list, or this torch does not have it.
    """
    if name in SIZE_FUNCTIONS:
        function, count = SIZE_FUNCTIONS[name]
        arguments = tuple(Argument(f"x{i}", None, True, None, False) for i in range(count))
        return Op(name, function, "size", None, arguments)
    if name == GETITEM:
        pair = (Argument("sequence", None, True, None, False), Argument("index", None, True, None, False))
        return Op(name, operator.getitem, "tensor", None, pair, aliases=frozenset({"sequence"}))
    if name != SYM_SIZE and name not in ATEN_OPS:
        raise ValueError(f"operation {name} is not on the allow-list of stage programs")
    _, packet, overload = name.split(".")
    overloaded = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if overloaded is None:
        raise ValueError(f"this version of torch ({torch.__version__}) has no operation {name}")
    return _describe(name, overloaded)


def _describe(name: str, function: Any) -> Op:
    schema = function._schema
    arguments = tuple(
        Argument(
            argument.name,
            argument.type,
            not argument.has_default_value(),
            argument.default_value if argument.has_default_value() else None,
            argument.kwarg_only,
        )
        for argument in schema.arguments
    )
    writes = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    aliases = frozenset(a.name for a in schema.arguments if a.alias_info is not None)
    if torch.Tag.maybe_aliasing_or_mutating in function.tags and not name.startswith("aten.batch_norm"):
        aliases |= frozenset(a.name for a in schema.arguments if a.type.kind() in ("TensorType", "ListType"))
    kind: Kind
    returns: int | None = None
    if name == SYM_SIZE:
        kind = "size"
    elif len(schema.returns) == 1 and schema.returns[0].type.kind() == "TensorType":
        kind = "tensor"
    else:
        kind = "tensors"
        returns = len(schema.returns) if len(schema.returns) > 1 else None
    seeded = torch.Tag.nondeterministic_seeded in function.tags
    return Op(name, function, kind, returns, arguments, writes, aliases, seeded, bool(writes))


def overwritten(op: Op, bound: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that a call overwrites, those included that the schema does not mark."""
    names = [name for name in op.writes if bound[name] is not None]
    if (op.name == "aten.batch_norm.default" and bound["training"]) or (
        op.name == "aten.instance_norm.default" and bound["use_input_stats"]
    ):
        names += [name for name in ("running_mean", "running_var") if bound[name] is not None]
    return names


def draws(op: Op, bound: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers."""
    if not op.seeded:
        return False
    if bound.get("train", True) is False or bound.get("training", True) is False:
        return False
    for name in ("p", "dropout_p", "dropout"):
        if name in bound and not isinstance(bound[name], Ref) and bound[name] in (0, None):
            return False
    return True


def check_call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], kind_of: Callable[[Ref], Kind]) -> None:
    """Check a call's arguments against the schema.

    Raises:
        ValueError: If number, names or types of the arguments do not fit.
    """
    bound = op.bind(args, kwargs)
    if op.name == GETITEM:
        sequence, index = bound["sequence"], bound["index"]
        if not isinstance(sequence, Ref) or kind_of(sequence) != "tensors":
            raise ValueError(f"{op.name} takes a sequence of tensors")
        if type(index) is not int or index < 0:
            raise ValueError(f"{op.name} takes an index that is not negative, got {index!r}")
        return
    given = len(args)
    for position, argument in enumerate(op.arguments):
        if position >= given and argument.name not in kwargs:
            continue
        if not _fits(argument.type, bound[argument.name], kind_of):
            wanted = "a number" if argument.type is None else str(argument.type)
            raise ValueError(f"{op.name}: argument {argument.name!r} wants {wanted}, got {bound[argument.name]!r}")


def _fits(wanted: Any, value: Any, kind_of: Callable[[Ref], Kind]) -> bool:
    is_size = isinstance(value, Ref) and kind_of(value) == "size"
    if wanted is None:
        return is_size or isinstance(value, bool | int | float)
    kind = wanted.kind()
    if kind == "OptionalType":
        return value is None or _fits(wanted.getElementType(), value, kind_of)
    if kind == "ListType":
        element = wanted.getElementType()
        if isinstance(value, list | tuple):
            return all(_fits(element, item, kind_of) for item in value)
        if isinstance(value, Ref) and kind_of(value) == "tensors":
            return bool(_tensor_like(element))
        # The schema's int[2] and the like take one number for all dimensions.
        return not _tensor_like(element) and _fits(element, value, kind_of)
    if kind == "TensorType":
        # A Python number is an implicit 0-d tensor.
        return (
            is_size or (isinstance(value, Ref) and kind_of(value) == "tensor") or isinstance(value, bool | int | float)
        )
    if kind == "IntType":
        return is_size or isinstance(value, int | torch.dtype | torch.layout | torch.memory_format)
    if kind == "FloatType":
        return is_size or isinstance(value, int | float)
    if kind == "BoolType":
        return is_size or isinstance(value, bool)
    if kind == "NumberType":
        return is_size or isinstance(value, bool | int | float | complex)
    if kind == "StringType":
        return isinstance(value, str)
    if kind == "DeviceObjType":
        return value is STAGE_DEVICE
    return False


def _tensor_like(element: Any) -> bool:
    kind = element.kind()
    return bool(kind == "TensorType" or (kind == "OptionalType" and element.getElementType().kind() == "TensorType"))
