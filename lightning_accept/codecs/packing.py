"""How codes of a few bits become bytes: along the batch, or along the row.

Codes are uint8 [n, cols], one per element; n is the batch dimension. In a byte the first element takes the highest
bits.

- *Bit planes* (any width): plane i holds bit i of every code. Along the batch, eight consecutive elements of the first
  dimension make one byte (AccEPT, arXiv 2311.05827): [bits, ceil(n / 8) * cols]. Along the row, eight neighbours do:
  [bits, ceil(n * cols / 8)].
- *Nibbles* (four bits): two elements make one byte, [ceil(n / 2), cols], or [ceil(n * cols / 2), 1] along the row.

Padding is zero. The functions here are the torch implementation, which the numba kernels must match.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plane_bytes(n: int, cols: int, along_row: bool) -> int:
    """Bytes of one bit plane."""
    return -(-n * cols // 8) if along_row else -(-n // 8) * cols


def nibble_bytes(n: int, cols: int, along_row: bool) -> int:
    """Bytes of four-bit codes."""
    return -(-n * cols // 2) if along_row else -(-n // 2) * cols


def pack_planes(codes: Tensor, bits: int, along_row: bool) -> Tensor:
    """Bit planes of ``codes`` uint8 [n, cols]: uint8 [bits, bytes]."""
    source = _groups(codes.reshape(-1, 1) if along_row else codes, 8)
    planes = torch.zeros(bits, source.shape[0], source.shape[2], dtype=torch.uint8)
    for plane in range(bits):
        for row in range(8):
            planes[plane] |= ((source[:, row] >> plane) & 1) << (7 - row)
    return planes.reshape(bits, -1)


def unpack_planes(planes: Tensor, n: int, cols: int, along_row: bool) -> Tensor:
    """The inverse of :func:`pack_planes`: uint8 [n, cols]."""
    bits = planes.shape[0]
    source = planes.reshape(bits, -1, 1 if along_row else cols)
    codes = torch.zeros(source.shape[1], 8, source.shape[2], dtype=torch.uint8)
    for plane in range(bits):
        for row in range(8):
            codes[:, row] |= ((source[plane] >> (7 - row)) & 1) << plane
    return codes.reshape(-1)[: n * cols].reshape(n, cols)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes below 16, uint8 [n, cols], two rows to a byte: uint8 [ceil(n / 2), cols]."""
    source = _groups(codes, 2)
    return (source[:, 0] << 4) | source[:, 1]


def unpack_nibbles(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack_nibbles`: uint8 [n, cols]."""
    return torch.stack((packed >> 4, packed & 15), 1).reshape(-1, packed.shape[1])[:n]


def _groups(codes: Tensor, size: int) -> Tensor:
    """Rows in groups of ``size``, the last padded with zeros: [groups, size, cols]."""
    missing = -codes.shape[0] % size
    return torch.nn.functional.pad(codes, (0, 0, 0, missing)).reshape(-1, size, codes.shape[1])
