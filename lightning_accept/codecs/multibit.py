"""Multi-bit quantisation: every element takes one of 2**k levels that follow the tensor from batch to batch."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_accept.codecs import backend as _backend
from lightning_accept.codecs.backend import Free, Signed
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
from lightning_accept.codecs.levels import F32, F64, initial_free_levels, signed_table
from lightning_accept.codecs.packing import plane_bytes
from lightning_accept.codecs.staging import Staging

Levels = Literal["signed", "free"]

_NOTICEABLE = 1e-3
_SMALLEST_SQUARES = 1e-300
_LARGEST = 2.0**100


class MultiBit(Codec):
    """Multi-bit quantisation (MBQ) of AccEPT (arXiv 2311.05827), or the same with free levels.

    ``signed``, the paper's: ``x`` is sent as ``B a - m``, B of signs, a [k] of floats, m the bias. The first batch sets
    a by residue initialisation; later batches take the nearest level of the last a, then solve for a new one.
    ``free``: 2**k levels of their own, found by k-means on a sample of the first batch and moved by one step of Lloyd's
    algorithm with every batch; much better for one-sided values such as ReLU outputs, for 2**k - k - 1 floats more.

    Payload: ``planes`` uint8 [k, bytes] (:mod:`~lightning_accept.codecs.packing`) and ``levels`` float32: a and m
    [k + 1], or the levels [2**k]. Batches of fewer than eight are packed along the row, because a byte along the batch
    would be mostly padding. These are sent as they are: integers and booleans, tensors of fewer than 256 elements,
    tensors that would not become smaller, and tensors with magnitudes beyond about 1e17.

    Args:
        bits: Bits per element, 1 to 8. Setting the attribute later starts from new levels.
        levels: ``signed`` or ``free``.
        reinit_every_epoch: Start from new levels in every epoch, as the paper does, instead of carrying them on.
        entropy: ``zstd`` packs along the row and compresses the planes without loss where that helps; worth it on
            links below about 10 Mbit/s. Needs the extra ``codecs``.

    Raises:
        ValueError: If an argument is out of range.
        ImportError: If ``entropy`` needs a package that is missing.
    """

    name: ClassVar[str] = "multibit"

    def __init__(
        self,
        bits: int = 2,
        levels: Levels = "signed",
        reinit_every_epoch: bool = False,
        entropy: Entropy | None = None,
    ) -> None:
        if levels not in ("signed", "free"):
            raise ValueError(f"levels must be 'signed' or 'free', not {levels!r}")
        check_entropy(entropy)
        self._levels: Levels = levels
        self._reinit_every_epoch = reinit_every_epoch
        self._entropy: Entropy | None = entropy
        self._staging = Staging()
        self._state: F64 | None = None
        self._first_error = 0.0
        self._bits = 0
        self.bits = bits

    @property
    def bits(self) -> int:
        """Bits per element, 1 to 8."""
        return self._bits

    @bits.setter
    def bits(self, bits: int | None) -> None:
        if type(bits) is not int or not 1 <= bits <= 8:
            raise ValueError(f"bits must be an integer from 1 to 8, not {bits!r}")
        if bits != self._bits:
            self._state = None
        self._bits = bits

    @override
    def config(self) -> dict[str, Any]:
        return {
            "bits": self._bits,
            "levels": self._levels,
            "reinit_every_epoch": self._reinit_every_epoch,
            "entropy": self._entropy,
        }

    @override
    def start_epoch(self) -> None:
        if self._reinit_every_epoch:
            self._state = None

    @override
    def prepare(self) -> None:
        _backend.warm_up()

    @override
    def encode(self, tensor: Tensor) -> Payload:
        size = tensor.numel() * tensor.element_size()
        if not quantisable(tensor) or self._encoded_bytes(tuple(tensor.shape)) >= size:
            self.last_error = 0.0
            return raw_payload(tensor)
        x = self._staging.load(tensor)
        along_row = self._along_row(x.shape[0])
        encoded = self._encode_free(x, along_row) if self._levels == "free" else self._encode_signed(x, along_row)
        if encoded is None:
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError("the tensor holds NaN or infinity")
            self.last_error = 0.0
            return raw_payload(tensor)
        self.last_error = encoded.error / encoded.squares if encoded.squares > 0 else 0.0
        sent = encoded.levels if isinstance(encoded, Free) else np.append(encoded.a, encoded.bias)
        meta = describe(tensor, self.name)
        meta.update(bits=self._bits, levels=self._levels, packing="row" if along_row else "batch")
        frame = compress(encoded.planes) if self._entropy else None
        if frame is not None:
            meta["packing"] = "zstd"
        planes = {"planes": encoded.planes} if frame is None else {"zstd": frame}
        return Payload({**planes, "levels": torch.from_numpy(sent.astype(np.float32))}, meta)

    def _encode_signed(self, x: Tensor, along_row: bool) -> Signed | None:
        kernels = _backend.backend()
        if self._state is None:
            encoded = kernels.encode_residue(x, self._bits, along_row)
        else:
            encoded = kernels.encode_signed(x, self._state, along_row)
        if encoded is not None:
            self._carry(encoded, encoded.a)
            if not encoded.a.any():
                # From all zeros the update never leaves.
                self._state = None
        return encoded

    def _encode_free(self, x: Tensor, along_row: bool) -> Free | None:
        levels = self._state
        if levels is None:
            if not math.isfinite(float(x.square().sum())):
                return None
            levels = initial_free_levels(x.view(-1).numpy(), 1 << self._bits)
        encoded = _backend.backend().encode_free(x, levels, along_row)
        if encoded is not None:
            self._carry(encoded, encoded.levels)
        return encoded

    def _carry(self, encoded: Signed | Free, levels: F64) -> None:
        """Keep ``levels`` for the next batch, unless they have lost the values.

        Values that suddenly shrink, grow or move leave levels behind that the updates do not bring back. The error is
        then a multiple of what it was right after the initialisation, and the next batch starts anew.
        """
        if self._state is None:
            self._first_error = encoded.error / max(encoded.squares, _SMALLEST_SQUARES)
        lost = encoded.error > (2.0 * self._first_error + _NOTICEABLE) * encoded.squares
        self._state = None if lost else levels

    @classmethod
    @override
    def decode(cls, payload: Payload) -> Tensor:
        meta = payload.meta
        n, cols = matrix_shape(meta)
        bits = integer(meta, "bits", 1, 8)
        packing, kind = meta.get("packing"), meta.get("levels")
        if packing not in ("batch", "row", "zstd") or kind not in ("signed", "free"):
            raise CodecError(f"not a payload of codec {cls.name!r}: packing {packing!r:.50}, levels {kind!r:.50}")
        along_row = packing != "batch"
        size = bits * plane_bytes(n, cols, along_row)
        only_parts(payload, {"zstd" if packing == "zstd" else "planes", "levels"})
        sent = part(payload, "levels", torch.float32, bits + 1 if kind == "signed" else 1 << bits)
        values: F32 = sent.numpy()
        if not -_LARGEST <= values.min() <= values.max() <= _LARGEST:
            raise CodecError("the levels hold NaN, infinity, or magnitudes that are never sent")
        if packing == "zstd":
            planes = decompress(part(payload, "zstd", torch.uint8, None), size)
        else:
            planes = part(payload, "planes", torch.uint8, size)
        table = signed_table(values[:-1], float(values[-1])) if kind == "signed" else values
        return restore(_backend.backend().decode_planes(planes.view(bits, -1), table, n, cols, along_row), meta)

    @override
    def wire_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        plain = super().wire_bytes(shape, itemsize)
        if math.prod(shape) < SMALLEST:
            return plain
        return min(plain, self._encoded_bytes(shape))

    def _along_row(self, n: int) -> bool:
        return self._entropy is not None or n < 8

    def _encoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of planes and levels, before zstd."""
        n, count = (shape[0], math.prod(shape)) if shape else (1, 1)
        levels = self._bits + 1 if self._levels == "signed" else 1 << self._bits
        return self._bits * plane_bytes(n, count // max(n, 1), self._along_row(n)) + 4 * levels
