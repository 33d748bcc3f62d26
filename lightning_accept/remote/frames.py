"""Frames: tensors and a string map as safetensors bytes, read and written without needless copies.

The format is that of https://huggingface.co/docs/safetensors: eight bytes of header length (little endian), a JSON
header, the tensors' bytes. It is read here rather than by the library because the library gives no access to the string
map of a frame in memory, copies every tensor and refuses tensors that share storage.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview

ALIGNMENT = 64
"""Bytes. Torch aligns its own memory like this, and the order of sums in some kernels depends on it."""

MAX_HEADER_BYTES = 64 * 2**20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WireError(ValueError):
    """Bytes from the network are not the frame that they should be, or a message cannot be put into a frame."""


def new_buffer(size: int) -> memoryview:
    """``size`` writable bytes that are not cleared and lie as torch's own memory does."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def pack_frame(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Tensors (any device and layout that :meth:`torch.Tensor.contiguous` understands) and strings as one frame.

    Raises:
        WireError: If a dtype has no name in the format.
    """
    parts: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise WireError(f"tensor {name!r} has dtype {tensor.dtype}, which a frame cannot carry")
        parts.append((name, tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()))
    # Those that keep the next one aligned come first, so that most can be used in place on arrival.
    parts.sort(key=lambda part: part[1].nbytes % ALIGNMENT != 0)

    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in parts:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(f"a frame header of {len(text)} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    return b"".join([struct.pack("<Q", len(text)), text, *(_bytes_of(tensor) for _, tensor in parts)])


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def unpack_frame(frame: Buffer, *, own: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The inverse of :func:`pack_frame`.

    Args:
        frame: The bytes. If they are writable, the tensors may use them in place, so they must not be reused.
        own: Give every tensor memory of its own, for tensors that are kept for long.

    Returns:
        CPU tensors, writable and disjoint, and the string map.

    Raises:
        WireError: If the bytes are anything but a well-formed frame.
    """
    view = memoryview(frame).cast("B")
    if view.readonly:
        copy = new_buffer(len(view))
        copy[:] = view
        view = copy
    if len(view) < 8:
        raise WireError(f"a frame of {len(view)} bytes is too short")
    (length,) = struct.unpack("<Q", view[:8])
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise WireError(f"a frame of {len(view)} bytes claims a header of {length} bytes")
    start = 8 + int(length)
    header = load_json(bytes(view[8:start]), "frame header")
    if not isinstance(header, dict):
        raise WireError("the frame header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WireError("the frame's metadata is not a map of strings")

    entries = [_entry(name, fields) for name, fields in header.items()]
    position = 0
    for begin, end, name, _, _ in sorted(entries, key=lambda entry: entry[:2]):
        if begin != position:
            raise WireError(f"tensor {name!r} starts at byte {begin} of the data, expected {position}")
        position = end
    if position != len(view) - start:
        raise WireError(f"the frame has {len(view) - start} bytes of data, its header describes {position}")
    return {
        name: _tensor(view[start + begin : start + end], name, dtype, shape, own)
        for begin, end, name, dtype, shape in entries
    }, metadata


def _entry(name: str, fields: Any) -> tuple[int, int, str, torch.dtype, tuple[int, ...]]:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise WireError(f"tensor {name!r} has unknown dtype {fields['dtype']!r}")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _are_sizes(shape) or len(shape) > 64:
        raise WireError(f"tensor {name!r} has no valid shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise WireError(f"tensor {name!r} has no valid offsets")
    begin, end = offsets
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise WireError(f"tensor {name!r} of shape {shape} and {dtype} does not fit its {end - begin} bytes")
    return begin, end, name, dtype, tuple(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _tensor(data: memoryview, name: str, dtype: torch.dtype, shape: tuple[int, ...], own: bool) -> Tensor:
    try:
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if own or flat.data_ptr() % ALIGNMENT:
            flat = flat.clone()
        # A tensor of its own on this memory: a view would share its version counter with the others.
        tensor = torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    except (RuntimeError, OverflowError) as error:
        raise WireError(f"tensor {name!r} of shape {list(shape)} cannot be made here: {error}") from error
    if dtype == torch.bool and int(flat.max()) > 1:
        raise WireError(f"boolean tensor {name!r} holds bytes other than 0 and 1")
    return tensor  # type: ignore[no-any-return]


def load_json(text: str | bytes, what: str, *, non_finite: bool = False) -> Any:
    """Parse JSON from the network.

    Args:
        text: The JSON.
        what: Names the text in errors.
        non_finite: Accept ``NaN`` and ``Infinity``, which Python writes but JSON does not know.

    Raises:
        WireError: If it is not JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not allowed here")

    try:
        return json.loads(text, parse_constant=None if non_finite else refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the {what} is not valid JSON: {error}") from error
