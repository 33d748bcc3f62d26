"""What a payload says about its tensor, and the checks before it is believed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_accept.codecs.base import CodecError, Payload

SMALLEST = 256
"""Tensors with fewer elements are not quantised: the description would weigh more than what is saved."""

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_ELEMENTS = 1 << 40
_MOST_DIMENSIONS = 64


def quantisable(tensor: Tensor) -> bool:
    """Whether a quantiser takes this tensor: floating point of at least two bytes, and not small."""
    return tensor.dtype in _NAMES and tensor.numel() >= SMALLEST


def describe(tensor: Tensor, codec: str) -> dict[str, Any]:
    """Metadata from which :func:`matrix_shape` and :func:`restore` work."""
    return {"codec": codec, "shape": list(tensor.shape), "dtype": _NAMES[tensor.dtype]}


def matrix_shape(meta: dict[str, Any]) -> tuple[int, int]:
    """The described tensor as [n, cols], n its first dimension.

    Raises:
        CodecError: If the shape or dtype is not one that a quantiser could have written.
    """
    shape, dtype = meta.get("shape"), meta.get("dtype")
    if not isinstance(shape, list) or not 1 <= len(shape) <= _MOST_DIMENSIONS:
        raise CodecError(f"not the shape of a quantised tensor: {shape!s:.100}")
    count = 1
    for size in shape:
        if type(size) is not int or size <= 0:
            raise CodecError(f"not the shape of a quantised tensor: {shape!s:.100}")
        count *= size
        if count > _MOST_ELEMENTS:
            raise CodecError(f"more elements than any tensor sent: {shape!s:.100}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CodecError(f"not the dtype of a quantised tensor: {dtype!s:.100}")
    return shape[0], count // shape[0]


def restore(values: Tensor, meta: dict[str, Any]) -> Tensor:
    """Float32 ``values`` in the described shape and dtype; never infinite where half precision ends."""
    dtype = _DTYPES[meta["dtype"]]
    if dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        values = values.clamp_(-largest, largest)
    values = values.view(meta["shape"])
    return values if dtype == torch.float32 else values.to(dtype)


def integer(meta: dict[str, Any], name: str, low: int, high: int) -> int:
    """``meta[name]``, an integer from ``low`` to ``high``.

    Raises:
        CodecError: If it is anything else.
    """
    value = meta.get(name)
    if type(value) is not int or not low <= value <= high:
        raise CodecError(f"{name} must be an integer from {low} to {high}, not {value!s:.100}")
    return value


def part(payload: Payload, name: str, dtype: torch.dtype, size: int | None) -> Tensor:
    """The payload's part ``name``: contiguous, of ``dtype``, with ``size`` elements (None: any number).

    Raises:
        CodecError: If it is missing or different.
    """
    tensor = payload.tensors.get(name)
    if tensor is None:
        raise CodecError(f"the payload has no part {name!r}, only {sorted(payload.tensors)}")
    if tensor.dtype != dtype or (size is not None and tensor.numel() != size):
        raise CodecError(f"part {name!r} should hold {size} x {dtype}, not {list(tensor.shape)} x {tensor.dtype}")
    tensor = tensor.contiguous().view(-1)
    # A part may begin at any byte of a received frame; the kernels read whole numbers.
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def only_parts(payload: Payload, names: set[str]) -> None:
    """Refuse a payload with other parts than ``names``.

    Raises:
        CodecError: If there are.
    """
    if set(payload.tensors) != names:
        raise CodecError(f"the payload should have the parts {sorted(names)}, not {sorted(payload.tensors)}")
