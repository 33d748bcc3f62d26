from __future__ import annotations

import sys

import pytest
import torch

from lightning_accept.codecs import CodecError, MultiBit, StochasticUniform
from lightning_accept.codecs.entropy import compress, decompress


def test_bytes_survive_or_stay_as_they_are() -> None:
    pytest.importorskip("zstandard")
    data = torch.arange(4000).div(100, rounding_mode="floor").to(torch.uint8)
    frame = compress(data)
    assert frame is not None
    assert len(frame) < len(data)
    assert decompress(frame, len(data)).equal(data)
    assert compress(torch.randint(256, (4000,), dtype=torch.uint8)) is None


def test_a_small_frame_never_stands_for_a_large_tensor() -> None:
    zstandard = pytest.importorskip("zstandard")
    size = 1 << 26
    assert compress(torch.zeros(size, dtype=torch.uint8)) is None
    bomb = torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(bytes(size))), dtype=torch.uint8)
    with pytest.raises(CodecError, match="cannot stand for"):
        decompress(bomb, size)
    with pytest.raises(CodecError, match="cannot stand for"):
        decompress(bomb, 1000)


def test_a_damaged_frame_is_refused() -> None:
    pytest.importorskip("zstandard")
    frame = compress(torch.zeros(4000, dtype=torch.uint8))
    assert frame is not None
    for position in range(len(frame)):
        damaged = frame.clone()
        damaged[position] ^= 0xFF
        try:
            plain = decompress(damaged, 4000)
        except CodecError:
            continue
        assert len(plain) == 4000
    for length in range(len(frame)):
        with pytest.raises(CodecError):
            decompress(frame[:length], 4000)


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for codec in (MultiBit, StochasticUniform):
        with pytest.raises(ImportError, match=r"pip install 'lightning-accept\[codecs\]'"):
            codec(entropy="zstd")
