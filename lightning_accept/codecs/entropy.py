"""The optional lossless stage behind a quantiser: zstd, or nothing where that does not help."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from lightning_accept.codecs.base import CodecError

Entropy = Literal["zstd"]

_LEVEL = 1
_SMALLEST_TRUSTED = 1 << 20
_LARGEST_RATIO = 1024


def check_entropy(entropy: str | None) -> None:
    """Refuse an unknown name, and ``zstd`` where its package is missing.

    Raises:
        ValueError: If the name is unknown.
        ImportError: If the package is missing.
    """
    if entropy not in (None, "zstd"):
        raise ValueError(f"entropy must be None or 'zstd', not {entropy!r}")
    if entropy is not None:
        _zstandard()


def compress(data: Tensor) -> Tensor | None:
    """``data`` (contiguous bytes) as a zstd frame, uint8 [m]; None where that is no shorter.

    None also where it would be shorter by so much that :func:`decompress` would not believe it.
    """
    source = data.reshape(-1).view(torch.uint8).numpy()
    frame = _zstandard().ZstdCompressor(level=_LEVEL).compress(source)
    if len(frame) >= len(source) or len(source) > _trusted(len(frame)):
        return None
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decompress(frame: Tensor, size: int) -> Tensor:
    """The ``size`` bytes in a zstd frame, uint8 [size].

    Raises:
        CodecError: If the frame is damaged, holds another number of bytes, or grows by a factor no codec would send.
    """
    zstandard = _zstandard()
    data = frame.numpy().tobytes()
    try:
        # The frame's own size decides what is allocated, so it is checked first.
        if size > _trusted(len(data)) or zstandard.frame_content_size(data) != size:
            raise CodecError(f"a zstd part of {len(data)} bytes cannot stand for {size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged zstd part: {error}") from error
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8)


def _trusted(length: int) -> int:
    return max(_SMALLEST_TRUSTED, _LARGEST_RATIO * length)


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError("entropy='zstd' needs zstandard: pip install 'lightning-accept[codecs]'") from error
    return zstandard
