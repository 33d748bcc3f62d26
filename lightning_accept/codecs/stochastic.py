"""Stochastic uniform quantisation: unbiased rounding to equal steps, under one scale or one per block."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_accept.codecs import backend as _backend
from lightning_accept.codecs.base import Codec, CodecError, NonFiniteError, Payload
from lightning_accept.codecs.cast import raw_payload
from lightning_accept.codecs.description import (
    SMALLEST,
    describe,
    integer,
    matrix_shape,
    only_parts,
    part,
    quantisable,
    restore,
)
from lightning_accept.codecs.entropy import Entropy, check_entropy, compress, decompress
from lightning_accept.codecs.packing import nibble_bytes, plane_bytes
from lightning_accept.codecs.staging import Staging

_TINY = 2.0**-90
_HUGE = 2.0**120
_RUN = 2048
_LARGEST_BLOCK = 1 << 20
_M64 = (1 << 64) - 1


class StochasticUniform(Codec):
    """The gradient quantiser of AccEPT (arXiv 2311.05827), with one global scale or one scale per block.

    ``u = x / s`` is rounded up with probability ``u - floor(u)``, else down, so the decoded value is right on average;
    ``s`` is the largest magnitude over ``2**(bits-1) - 1``. With ``block``, every ``block`` consecutive elements (in
    row order) have their own scale, a float16 fraction of the global one, rounded up: far less noise where a few large
    values rule a tensor, for 16 / block bits per element more.

    Payload: ``scale`` float32 [1]; with blocks ``fractions`` float16 [blocks]; ``codes``: int8 for 8 bits, two to a
    byte along the batch for 4, bit planes along the batch for the other widths
    (:mod:`~lightning_accept.codecs.packing`). Batches of fewer than eight (for 4 bits: two) are packed along the row.
    Sent as they are: integers and booleans, tensors of fewer than 256 elements, tensors that would not become smaller,
    and tensors whose largest magnitude is not zero and not between 2**-90 and 2**120.

    Rounding draws from a hash of seed, number of the call and number of the element: the same on every machine, for
    either implementation. :attr:`last_error` is measured on a few percent of a large tensor.

    Args:
        bits: Bits per element, 2 to 8.
        block: Elements per scale, at least 16, or None for one scale.
        entropy: ``zstd`` packs along the row and compresses the codes without loss where that helps. Needs the extra
            ``codecs``.
        seed: Of the random rounding.

    Raises:
        ValueError: If an argument is out of range.
        ImportError: If ``entropy`` needs a package that is missing.
    """

    name: ClassVar[str] = "stochastic"

    def __init__(self, bits: int = 8, block: int | None = None, entropy: Entropy | None = None, seed: int = 0) -> None:
        if block is not None and (type(block) is not int or not 16 <= block <= _LARGEST_BLOCK):
            raise ValueError(f"block must be None or an integer from 16 to {_LARGEST_BLOCK}, not {block!r}")
        check_entropy(entropy)
        self.bits = bits
        self._block = block
        self._entropy: Entropy | None = entropy
        self._seed = int(seed)
        self._stream = _mix((self._seed & _M64) ^ 0x9E3779B97F4A7C15)
        self._calls = 0
        self._staging = Staging()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def bits(self) -> int:
        """Bits per element, 2 to 8."""
        return self._bits

    @bits.setter
    def bits(self, bits: int | None) -> None:
        if type(bits) is not int or not 2 <= bits <= 8:
            raise ValueError(f"bits must be an integer from 2 to 8, not {bits!r}")
        self._bits = bits

    @override
    def config(self) -> dict[str, Any]:
        return {"bits": self._bits, "block": self._block, "entropy": self._entropy, "seed": self._seed}

    @override
    def prepare(self) -> None:
        _backend.warm_up()

    @override
    def encode(self, tensor: Tensor) -> Payload:
        size = tensor.numel() * tensor.element_size()
        if not quantisable(tensor) or self._encoded_bytes(tuple(tensor.shape)) >= size:
            return self._raw(tensor)
        matrix = self._staging.load(tensor)
        n, cols = matrix.shape
        x = matrix.view(-1)
        kernels = _backend.backend()
        maxima, largest = kernels.block_maxima(x, self._block or _RUN)
        if not math.isfinite(largest) and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError("the tensor holds NaN or infinity")
        if not (largest == 0 or _TINY <= largest <= _HUGE):
            return self._raw(tensor)
        scale = torch.from_numpy(np.array([largest / ((1 << (self._bits - 1)) - 1)], np.float32))
        fractions = None
        scales, block = scale, x.numel()
        if self._block is not None:
            scales, fractions = kernels.block_scales(maxima, largest, scale)
            block = self._block
        codes = self._code_buffer(x.numel())
        error, squares = kernels.round_stochastically(x, scales, block, self._bits, self._keys(), codes)
        self.last_error = error / squares if squares > 0 else 0.0
        along_row = self._along_row(n)
        meta = describe(tensor, self.name)
        meta.update(bits=self._bits, block=self._block, packing="row" if along_row else "batch")
        packed = self._pack(codes.view(n, cols), along_row)
        frame = compress(packed) if self._entropy else None
        tensors = {"codes": packed, "scale": scale}
        if frame is not None:
            meta["packing"] = "zstd"
            tensors = {"zstd": frame, "scale": scale}
        if fractions is not None:
            tensors["fractions"] = fractions
        return Payload(tensors, meta)

    def _code_buffer(self, size: int) -> Tensor:
        """Where the codes go: reused, except for eight bits, where the codes are what is sent."""
        if self._bits == 8:
            return torch.empty(size, dtype=torch.uint8)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]

    def _raw(self, tensor: Tensor) -> Payload:
        self.last_error = 0.0
        return raw_payload(tensor)

    def _pack(self, codes: Tensor, along_row: bool) -> Tensor:
        kernels = _backend.backend()
        if self._bits == 8:
            return codes.view(torch.int8)
        if self._bits == 4:
            return kernels.pack_nibbles(codes.view(-1, 1) if along_row else codes)
        return kernels.pack_planes(codes, self._bits, along_row)

    @classmethod
    @override
    def decode(cls, payload: Payload) -> Tensor:
        meta = payload.meta
        n, cols = matrix_shape(meta)
        bits = integer(meta, "bits", 2, 8)
        block = None if meta.get("block") is None else integer(meta, "block", 16, _LARGEST_BLOCK)
        packing = meta.get("packing")
        if packing not in ("batch", "row", "zstd"):
            raise CodecError(f"not a payload of codec {cls.name!r}: packing {packing!r:.50}")
        along_row = packing != "batch"
        only_parts(
            payload,
            {"zstd" if packing == "zstd" else "codes", "scale"} | (set() if block is None else {"fractions"}),
        )
        scales = part(payload, "scale", torch.float32, 1)
        if not 0 <= float(scales) <= _HUGE:
            raise CodecError(f"a scale of {float(scales)} is never sent")
        if block is not None:
            fractions = part(payload, "fractions", torch.float16, -(-n * cols // block)).float()
            least, most = fractions.aminmax()
            if not (float(least) >= 0 and float(most) <= 1):
                raise CodecError("a scale's fraction is not between 0 and 1")
            scales = fractions * scales
        size = _code_bytes(n, cols, bits, along_row)
        if packing == "zstd":
            packed = decompress(part(payload, "zstd", torch.uint8, None), size)
        else:
            packed = part(payload, "codes", torch.int8 if bits == 8 else torch.uint8, size).view(torch.uint8)
        kernels = _backend.backend()
        if bits == 4 and along_row:
            packed = kernels.unpack_nibbles(packed.view(-1, 1), n * cols)
        elif bits == 4:
            packed = kernels.unpack_nibbles(packed.view(-1, cols), n)
        elif bits < 8:
            packed = kernels.unpack_planes(packed.view(bits, -1), n, cols, along_row)
        return restore(kernels.dequantise(packed.reshape(-1), scales, block or n * cols, bits), meta)

    @override
    def wire_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        plain = super().wire_bytes(shape, itemsize)
        if math.prod(shape) < SMALLEST:
            return plain
        return min(plain, self._encoded_bytes(shape))

    def _along_row(self, n: int) -> bool:
        return self._entropy is not None or n < {8: 1, 4: 2}.get(self._bits, 8)

    def _encoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes and scales, before zstd."""
        n, count = (shape[0], math.prod(shape)) if shape else (1, 1)
        fractions = 0 if self._block is None else 2 * -(-count // self._block)
        return _code_bytes(n, count // max(n, 1), self._bits, self._along_row(n)) + 4 + fractions

    def _keys(self) -> tuple[int, int]:
        """Two 32-bit keys for this call: splitmix64 (Steele et al., 2014) of seed and number of the call."""
        mixed = _mix((self._stream + self._calls) & _M64)
        self._calls += 1
        return mixed >> 32, mixed & 0xFFFFFFFF


def _code_bytes(n: int, cols: int, bits: int, along_row: bool) -> int:
    if bits == 8:
        return n * cols
    return nibble_bytes(n, cols, along_row) if bits == 4 else bits * plane_bytes(n, cols, along_row)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    return z ^ (z >> 31)
