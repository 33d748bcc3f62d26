"""Frames carry tensors bit for bit, agree with the safetensors library, and reject everything else."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch

from lightning_accept.remote.frames import ALIGNMENT, WireError, new_buffer, pack_frame, unpack_frame

TENSORS = {
    "float": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    "double": torch.randn(2, dtype=torch.float64),
    "half": torch.randn(7).half(),
    "bfloat": torch.randn(2, 3).bfloat16(),
    "long": torch.tensor([-(2**63), 2**63 - 1]),
    "byte": torch.arange(5, dtype=torch.uint8),
    "short": torch.arange(-3, 3, dtype=torch.int16),
    "bool": torch.tensor([[True, False, True]]),
    "scalar": torch.tensor(3.5),
    "integer scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "empty bool": torch.empty(2, 0, 3, dtype=torch.bool),
    "complex": torch.tensor([1 + 2j]),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "large": torch.randn(64, 64),
}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("writable", [False, True])
def test_every_dtype_and_shape_returns_bit_for_bit(own: bool, writable: bool) -> None:
    frame: Any = pack_frame(TENSORS, {"a": 'ü\n"x"'})
    if writable:
        buffer = new_buffer(len(frame))
        buffer[:] = frame
        frame = buffer
    tensors, metadata = unpack_frame(frame, own=own)
    assert metadata == {"a": 'ü\n"x"'}
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert same_bits(tensors[name], tensor), name


def test_the_library_reads_our_frames_and_we_read_its() -> None:
    ours = safetensors.torch.load(pack_frame(TENSORS, {"key": "value"}))
    assert all(same_bits(ours[name], tensor) for name, tensor in TENSORS.items())
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    theirs, metadata = unpack_frame(safetensors.torch.save(contiguous, {"key": "value"}))
    assert metadata == {"key": "value"}
    assert all(same_bits(theirs[name], tensor) for name, tensor in TENSORS.items())


def test_tensors_are_writable_disjoint_aligned_and_no_views() -> None:
    frame = new_buffer(len(pack_frame(TENSORS, {})))
    frame[:] = pack_frame(TENSORS, {})
    tensors, _ = unpack_frame(frame)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert not tensor._is_view()
        assert tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT == 0, name
        version = {other: tensors[other]._version for other in tensors if other != name}
        tensor.zero_()
        assert {other: tensors[other]._version for other in tensors if other != name} == version
        for other, value in before.items():
            if other != name and tensors[other].any():
                assert same_bits(tensors[other], value)
        before[name] = tensor.clone()


def test_a_large_tensor_is_used_in_place_and_an_owned_one_is_not() -> None:
    packed = pack_frame({"x": torch.zeros(1024)}, {})
    frame = new_buffer(len(packed))
    frame[:] = packed
    shared = unpack_frame(frame)[0]["x"]
    owned = unpack_frame(frame, own=True)[0]["x"]
    frame[-4:] = struct.pack("<f", 5.0)
    assert shared[-1] == 5.0
    assert owned[-1] == 0.0


def test_a_frame_of_read_only_bytes_is_left_alone() -> None:
    frame = pack_frame({"x": torch.zeros(1024)}, {})
    copy = bytes(frame)
    unpack_frame(frame)[0]["x"].fill_(1.0)
    assert frame == copy


def test_tensors_that_share_storage_travel_separately() -> None:
    base = torch.arange(4.0)
    tensors, _ = unpack_frame(pack_frame({"a": base, "b": base, "c": base[1:]}, {}))
    tensors["a"].zero_()
    assert tensors["b"].tolist() == [0, 1, 2, 3]
    assert tensors["c"].tolist() == [1, 2, 3]


def test_a_dtype_without_a_name_is_refused_by_name() -> None:
    with pytest.raises(WireError, match=r"'z' has dtype torch.complex128"):
        pack_frame({"z": torch.zeros(1, dtype=torch.complex128)}, {})


def frame_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 100) + b"{}",
        frame_of(b"not json"),
        frame_of(b"\xff\xfe"),
        frame_of(b"[" * 100_000),
        frame_of([]),
        frame_of({}, b"left over"),
        frame_of({"__metadata__": []}),
        frame_of({"__metadata__": {"a": 1}}),
        frame_of({"x": 3}),
        frame_of({"x": {"dtype": "F32"}}, bytes(4)),
        frame_of({"x": {**entry(), "more": 1}}, bytes(4)),
        frame_of({"x": entry(dtype="F31")}, bytes(4)),
        frame_of({"x": entry(dtype=["F32"])}, bytes(4)),
        frame_of({"x": entry(shape=3)}, bytes(4)),
        frame_of({"x": entry(shape=[-1])}, bytes(4)),
        frame_of({"x": entry(shape=[1.0])}, bytes(4)),
        frame_of({"x": entry(shape=[True])}, bytes(4)),
        frame_of({"x": entry(shape=[1] * 65)}, bytes(4)),
        frame_of({"x": entry(shape=[2**63, 0], offsets=[0, 0])}),
        frame_of({"x": entry(shape=[2**61, 2**61, 0], offsets=[0, 0])}),
        frame_of({"x": entry(shape=[10**30])}, bytes(4)),
        frame_of({"x": entry(shape=[2])}, bytes(4)),
        frame_of({"x": entry(offsets=[0])}, bytes(4)),
        frame_of({"x": entry(offsets=[4, 0])}, bytes(4)),
        frame_of({"x": entry(offsets=[0, 4])}, bytes(3)),
        frame_of({"x": entry(offsets=[4, 8])}, bytes(8)),
        frame_of({"x": entry(), "y": entry()}, bytes(4)),
        frame_of({"x": entry(dtype="BOOL", offsets=[0, 1])}, b"\x02"),
        frame_of(b'{"x":' + b"9" * 5000 + b"}"),
        frame_of(b'{"x":NaN}'),
    ],
)
def test_malformed_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        unpack_frame(frame)


def test_no_truncation_or_damage_of_a_header_gets_through_as_another_error() -> None:
    frame = pack_frame({"x": torch.arange(4.0), "b": torch.tensor([True])}, {"k": "v"})
    for length in range(len(frame)):
        with pytest.raises(WireError):
            unpack_frame(frame[:length])
    header = 8 + struct.unpack("<Q", frame[:8])[0]
    for position in range(header):
        damaged = bytearray(frame)
        damaged[position] ^= 0x15
        try:
            unpack_frame(damaged)
        except WireError:
            continue
