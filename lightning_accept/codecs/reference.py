"""The torch implementation of :class:`~lightning_accept.codecs.backend.Backend`: reference and fallback."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_accept.codecs import levels as _levels
from lightning_accept.codecs.backend import Free, Signed
from lightning_accept.codecs.levels import F32, F64, U8
from lightning_accept.codecs.packing import pack_nibbles, pack_planes, unpack_nibbles, unpack_planes

__all__ = [
    "NAME",
    "block_maxima",
    "block_scales",
    "decode_planes",
    "dequantise",
    "encode_free",
    "encode_residue",
    "encode_signed",
    "pack_nibbles",
    "pack_planes",
    "round_stochastically",
    "unpack_nibbles",
    "unpack_planes",
]

NAME = "torch"

_CHUNK = 1 << 16
_MASK = 0xFFFFFFFF


def encode_residue(x: Tensor, bits: int, along_row: bool) -> Signed | None:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    squares = _squares(x)
    if not math.isfinite(squares):
        return None
    rest = x.clone()
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    a = np.zeros(bits, np.float32)
    for i in range(bits):
        a[i] = float(rest.abs().mean(dtype=torch.float64))
        up = rest >= 0
        codes |= up.to(torch.uint8) << i
        rest += torch.where(up, -float(a[i]), float(a[i]))
    bias = -float(rest.mean(dtype=torch.float64))
    error = max(0.0, _squares(rest) - x.numel() * bias * bias)
    return Signed(pack_planes(codes, bits, along_row), a.astype(np.float64), bias, error, squares)


def encode_signed(x: Tensor, a: F64, along_row: bool) -> Signed | None:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    squares = _squares(x)
    if not math.isfinite(squares):
        return None
    thresholds, _, codes = _levels.signed_order(a)
    planes, counts, sums = _encode(x, thresholds, codes, along_row)
    updated, bias, error = _levels.signed_update(len(a), codes, counts, sums, squares)
    return Signed(planes, updated, float(bias), float(error), squares)


def encode_free(x: Tensor, levels: F64, along_row: bool) -> Free | None:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    squares = _squares(x)
    if not math.isfinite(squares):
        return None
    thresholds, _, codes = _levels.free_order(levels)
    planes, counts, sums = _encode(x, thresholds, codes, along_row)
    updated, error = _levels.free_update(levels, counts, sums, squares)
    return Free(planes, updated, float(error), squares)


def _squares(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _encode(x: Tensor, thresholds: F32, codes: U8, along_row: bool) -> tuple[Tensor, F64, F64]:
    count = len(codes)
    rank = torch.bucketize(x, torch.from_numpy(thresholds[: count - 1]), right=True)
    planes = pack_planes(torch.from_numpy(codes)[rank], count.bit_length() - 1, along_row)
    counts = torch.bincount(rank.reshape(-1), minlength=count).double().numpy()
    sums = torch.bincount(rank.reshape(-1), weights=x.reshape(-1).double(), minlength=count).numpy()
    return planes, counts, sums


def decode_planes(planes: Tensor, table: F32, n: int, cols: int, along_row: bool) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    codes = unpack_planes(planes, n, cols, along_row)
    return torch.from_numpy(table)[codes.to(torch.int32)]


def block_maxima(x: Tensor, block: int) -> tuple[Tensor, float]:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    maxima = _blocks(x, block).abs().amax(1)
    return maxima, float(maxima.max())


def block_scales(maxima: Tensor, largest: float, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    exact = maxima / largest if largest > 0 else torch.zeros_like(maxima)
    nearest = exact.half()
    fractions = (nearest.view(torch.int16) + (nearest.float() < exact)).view(torch.float16)
    return fractions.float() * scale, fractions


def round_stochastically(
    x: Tensor, scales: Tensor, block: int, bits: int, keys: tuple[int, int], out: Tensor
) -> tuple[float, float]:
    """See :class:`~lightning_accept.codecs.backend.Backend`. Here the sample is the whole tensor."""
    limit = (1 << (bits - 1)) - 1
    # A little too large, so that the largest value lands on the last step for certain; the rounding stops there.
    inverses = torch.where(scales > 0, (1.0 / scales) * (1.0 + 2.0**-22), 0.0)
    error = squares = 0.0
    for low in range(0, x.numel(), _CHUNK):
        part = x[low : low + _CHUNK]
        index = torch.arange(low, low + len(part))
        which = index // block
        u = part * inverses[which]
        q = (u + _chances(index, keys)).round_().clamp_(-limit, limit)
        out[low : low + len(part)] = q.to(torch.int32).add_(0 if bits == 8 else limit + 1).to(torch.uint8)
        weight = scales[which].double().square_()
        error += float(((q - u).double().square_() * weight).sum())
        squares += float((u.double().square_() * weight).sum())
    return error, squares


def _chances(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """Float32 in [-1/2, 1/2), a hash of element number and keys: 32-bit arithmetic done in 64 bits."""
    h = (index * 0x9E3779B1 + keys[0]) & _MASK
    h = h ^ (h >> 15) ^ keys[1]
    h = (h * 0x85EBCA77) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE3D) & _MASK
    return (h - ((h >> 31) << 32)).to(torch.float32) * 2.0**-32


def dequantise(codes: Tensor, scales: Tensor, block: int, bits: int) -> Tensor:
    """See :class:`~lightning_accept.codecs.backend.Backend`."""
    values = codes.view(torch.int8).float() if bits == 8 else codes.float() - (1 << (bits - 1))
    return (_blocks(values, block) * scales[:, None]).reshape(-1)[: len(values)]


def _blocks(x: Tensor, block: int) -> Tensor:
    """``x`` [n] as [ceil(n / block), block], padded with zeros."""
    block = min(block, len(x))
    return torch.nn.functional.pad(x, (0, -len(x) % block)).reshape(-1, block)
