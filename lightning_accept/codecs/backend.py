"""Which implementation of the heavy loops is used: numba where it is installed, torch otherwise."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_accept.codecs.levels import F32, F64

log = logging.getLogger("lightning_accept")


class Signed(NamedTuple):
    """A tensor encoded with signed levels: planes, the updated ``a``, the bias, squared error and sum of squares."""

    planes: Tensor
    a: F64
    bias: float
    error: float
    squares: float


class Free(NamedTuple):
    """A tensor encoded with free levels: planes, the updated levels, squared error and sum of squares."""

    planes: Tensor
    levels: F64
    error: float
    squares: float


class Backend(Protocol):
    """The operations that both implementations offer, on contiguous CPU tensors.

    ``x`` is float32 [n, cols]. Encoders answer None where the sum of squares is not finite: the tensor then holds NaN,
    infinity or magnitudes beyond 1e17.
    """

    NAME: str

    def encode_residue(self, x: Tensor, bits: int, along_row: bool) -> Signed | None:
        """Residue initialisation: ``a[i]`` is the mean magnitude of what the first i signs leave."""

    def encode_signed(self, x: Tensor, a: F64, along_row: bool) -> Signed | None:
        """Nearest signed sum of ``a`` for every element, then a new ``a``."""

    def encode_free(self, x: Tensor, levels: F64, along_row: bool) -> Free | None:
        """Nearest of ascending ``levels`` for every element, then new levels."""

    def decode_planes(self, planes: Tensor, table: F32, n: int, cols: int, along_row: bool) -> Tensor:
        """Float32 [n, cols]: ``table[code]`` of every element."""

    def block_maxima(self, x: Tensor, block: int) -> tuple[Tensor, float]:
        """Largest magnitude of every ``block`` elements of float32 ``x`` [n], and of all; not finite where x is not."""

    def block_scales(self, maxima: Tensor, largest: float, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Scales float32 [blocks] and the float16 fractions of ``scale`` float32 [1] that they are.

        A fraction is ``maxima / largest``, rounded up.
        """

    def round_stochastically(
        self, x: Tensor, scales: Tensor, block: int, bits: int, keys: tuple[int, int], out: Tensor
    ) -> tuple[float, float]:
        """Codes of float32 ``x`` [n] under one scale per block into ``out`` uint8 [n].

        Returns squared error and sum of squares of a sample. A code is the rounded value plus ``2**(bits-1)``, or, for
        eight bits, the byte of an int8.
        """

    def dequantise(self, codes: Tensor, scales: Tensor, block: int, bits: int) -> Tensor:
        """Float32 [n] of ``codes`` uint8 [n]."""

    def pack_planes(self, codes: Tensor, bits: int, along_row: bool) -> Tensor:
        """See :func:`lightning_accept.codecs.packing.pack_planes`."""

    def unpack_planes(self, planes: Tensor, n: int, cols: int, along_row: bool) -> Tensor:
        """See :func:`lightning_accept.codecs.packing.unpack_planes`."""

    def pack_nibbles(self, codes: Tensor) -> Tensor:
        """See :func:`lightning_accept.codecs.packing.pack_nibbles`."""

    def unpack_nibbles(self, packed: Tensor, n: int) -> Tensor:
        """See :func:`lightning_accept.codecs.packing.unpack_nibbles`."""


_lock = threading.Lock()
_chosen: Backend | None = None


def backend() -> Backend:
    """The implementation in use. The first call chooses it, says so in the log, and compiles the kernels.

    Compiling takes some ten seconds of CPU time once per machine; afterwards the kernels come from numba's cache.
    """
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = _choose()
    return _chosen


def warm_up() -> None:
    """Load or compile the kernels now, so that no batch pays for it."""
    backend()


def _choose() -> Backend:
    try:
        from lightning_accept.codecs import fast
    except ImportError as error:
        from lightning_accept.codecs import reference

        log.warning(
            "codecs run on torch, about twenty times slower than on numba (%s); pip install 'lightning-accept[codecs]'",
            error,
        )
        return reference
    log.info("codecs run on numba kernels")
    return fast
