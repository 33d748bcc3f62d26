"""The numba implementation of :class:`~lightning_accept.codecs.backend.Backend`: kernels called on torch tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_accept.codecs import kernels
from lightning_accept.codecs.backend import Free, Signed
from lightning_accept.codecs.levels import F32, F64, U8
from lightning_accept.codecs.packing import plane_bytes

NAME = "numba"

_WEYL = np.arange(2048, dtype=np.uint32) * np.uint32(0x9E3779B1)


def encode_residue(x: Tensor, bits: int, along_row: bool) -> Signed | None:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    a = np.zeros(bits, np.float32)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    total, error, squares = kernels.encode_residue(x.reshape(-1).numpy(), bits, a, codes.reshape(-1).numpy())
    if not math.isfinite(squares):
        return None
    bias = -total / x.numel()
    error = max(0.0, error - x.numel() * bias * bias)
    return Signed(pack_planes(codes, bits, along_row), a.astype(np.float64), bias, error, squares)


def encode_signed(x: Tensor, a: F64, along_row: bool) -> Signed | None:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    thresholds, deltas, codes = kernels.signed_order(a)
    planes, counts, sums, squares = _encode(x, thresholds, deltas, codes, along_row)
    if not math.isfinite(squares):
        return None
    updated, bias, error = kernels.signed_update(len(a), codes, counts, sums, squares)
    return Signed(planes, updated, bias, error, squares)


def encode_free(x: Tensor, levels: F64, along_row: bool) -> Free | None:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    thresholds, deltas, codes = kernels.free_order(levels)
    planes, counts, sums, squares = _encode(x, thresholds, deltas, codes, along_row)
    if not math.isfinite(squares):
        return None
    updated, error = kernels.free_update(levels, counts, sums, squares)
    return Free(planes, updated, error, squares)


def _encode(x: Tensor, thresholds: F32, deltas: U8, codes: U8, along_row: bool) -> tuple[Tensor, F64, F64, float]:
    n, cols = x.shape
    bits = len(codes).bit_length() - 1
    planes = torch.empty(bits, plane_bytes(n, cols, along_row), dtype=torch.uint8)
    counts = np.empty(len(codes), np.float64)
    sums = np.empty(len(codes), np.float64)
    squares = kernels.encode_levels(
        x.numpy(), thresholds, deltas, codes, bits, along_row or cols == 1, planes.numpy(), counts, sums
    )
    return planes, counts, sums, squares


def decode_planes(planes: Tensor, table: F32, n: int, cols: int, along_row: bool) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    bits = planes.shape[0]
    padded = np.zeros(4 if bits <= 2 else 16 if bits <= 4 else 256, np.float32)
    padded[: len(table)] = table
    if bits in (1, 3):
        padded[-len(table) // 2 :] = table[len(table) // 2 :]
    out = torch.empty(n, cols)
    kernels.decode_planes(planes.numpy(), bits, along_row or cols == 1, padded, out.numpy())
    return out


def block_maxima(x: Tensor, block: int) -> tuple[Tensor, float]:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    out = np.empty(-(-x.numel() // block) + 1, np.float32)
    kernels.block_maxima(x.numpy().view(np.uint32), block, out.view(np.uint32))
    return torch.from_numpy(out[:-1]), float(out[-1])


def block_scales(maxima: Tensor, largest: float, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    scales = np.zeros(len(maxima), np.float32)
    fractions = np.zeros(len(maxima), np.uint16)
    if largest > 0:
        kernels.block_scales(maxima.numpy(), largest, float(scale), scales, fractions)
    return torch.from_numpy(scales), torch.from_numpy(fractions.view(np.float16))


def round_stochastically(
    x: Tensor, scales: Tensor, block: int, bits: int, keys: tuple[int, int], out: Tensor
) -> tuple[float, float]:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    error, squares = kernels.round_stochastically(x.numpy(), _WEYL, scales.numpy(), block, bits, *keys, out.numpy())
    return error, squares


def dequantise(codes: Tensor, scales: Tensor, block: int, bits: int) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    out = torch.empty(codes.numel())
    kernels.dequantise(codes.numpy(), scales.numpy(), block, bits, out.numpy())
    return out


def pack_planes(codes: Tensor, bits: int, along_row: bool) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    n, cols = codes.shape
    planes = torch.empty(bits, plane_bytes(n, cols, along_row), dtype=torch.uint8)
    kernels.pack_planes(codes.numpy(), bits, along_row or cols == 1, planes.numpy())
    return planes


def unpack_planes(planes: Tensor, n: int, cols: int, along_row: bool) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    codes = torch.empty(n, cols, dtype=torch.uint8)
    kernels.unpack_planes(planes.numpy(), planes.shape[0], along_row or cols == 1, codes.numpy())
    return codes


def pack_nibbles(codes: Tensor) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    packed = torch.empty(-(-codes.shape[0] // 2), codes.shape[1], dtype=torch.uint8)
    kernels.pack_nibbles(codes.numpy(), packed.numpy())
    return packed


def unpack_nibbles(packed: Tensor, n: int) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    codes = torch.empty(n, packed.shape[1], dtype=torch.uint8)
    kernels.unpack_nibbles(packed.numpy(), codes.numpy())
    return codes
