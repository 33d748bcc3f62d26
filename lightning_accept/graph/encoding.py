"""Arguments of operations as JSON values, and back."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_accept.graph.errors import ProgramError
from lightning_accept.graph.values import STAGE_DEVICE, Ref, RefKind

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "preserve": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_REFS: dict[str, RefKind] = {"v": "value", "p": "parameter", "b": "buffer", "c": "constant"}
_FLOATS = ("inf", "-inf", "nan")
_MAX_DEPTH = 8

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LAYOUT_NAMES = {layout: name for name, layout in _LAYOUTS.items()}
_MEMORY_FORMAT_NAMES = {layout: name for name, layout in _MEMORY_FORMATS.items()}
_REF_KEYS = {kind: key for key, kind in _REFS.items()}


def encode_value(value: Any) -> Any:
    """``value`` as something that ``json.dumps`` takes.

    Raises:
        ProgramError: If a stage program cannot hold it.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [encode_value(value.real), encode_value(value.imag)]}
    if isinstance(value, list | tuple):
        return [encode_value(item) for item in value]
    if isinstance(value, Ref):
        return {_REF_KEYS[value.kind]: value.name}
    if value is STAGE_DEVICE:
        return {"device": "stage"}
    if isinstance(value, torch.dtype) and value in _DTYPE_NAMES:
        return {"dtype": _DTYPE_NAMES[value]}
    if isinstance(value, torch.layout) and value in _LAYOUT_NAMES:
        return {"layout": _LAYOUT_NAMES[value]}
    if isinstance(value, torch.memory_format) and value in _MEMORY_FORMAT_NAMES:
        return {"memory_format": _MEMORY_FORMAT_NAMES[value]}
    raise ProgramError(f"a stage program cannot hold {value!r}")


def decode_value(data: Any, depth: int = 0) -> Any:
    """The inverse of :func:`encode_value`; tuples come back as lists.

    Raises:
        ProgramError: If ``data`` is not something that :func:`encode_value` writes.
    """
    if data is None or isinstance(data, bool | int | str | float):
        if isinstance(data, float) and not math.isfinite(data):
            raise ProgramError("a number in the stage program is too large")
        if type(data) is int and not -(2**63) <= data < 2**63:
            raise ProgramError("an integer in the stage program does not fit 64 bits")
        return data
    if depth > _MAX_DEPTH:
        raise ProgramError("an argument in the stage program is nested too deeply")
    if isinstance(data, list):
        return [decode_value(item, depth + 1) for item in data]
    if isinstance(data, dict) and len(data) == 1:
        ((key, value),) = data.items()
        if key in _REFS and isinstance(value, str):
            return Ref(_REFS[key], value)
        if key == "float" and value in _FLOATS:
            return float(value)
        if key == "complex" and isinstance(value, list) and len(value) == 2:
            real, imaginary = (decode_value(part, depth + 1) for part in value)
            if isinstance(real, int | float) and isinstance(imaginary, int | float):
                return complex(real, imaginary)
        if key == "device" and value == "stage":
            return STAGE_DEVICE
        tables: dict[str, dict[str, Any]] = {"dtype": DTYPES, "layout": _LAYOUTS, "memory_format": _MEMORY_FORMATS}
        table = tables.get(key)
        if table is not None and isinstance(value, str) and value in table:
            return table[value]
    raise ProgramError(f"cannot read the argument {str(data)[:200]}")
