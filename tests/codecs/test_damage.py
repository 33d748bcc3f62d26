"""Payloads come from the network: whatever is in them, decoding answers with a tensor in proportion, or CodecError."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_accept.codecs import Codec, CodecError, MultiBit, Payload, StochasticUniform, decode


def payload_of(codec: Codec) -> Payload:
    x = torch.randn(13, 7, 5, generator=torch.Generator().manual_seed(0))
    x[:, 3:] = 0
    codec.encode(x)
    return codec.encode(x)


def originals() -> list[Payload]:
    codecs: list[Codec] = [
        MultiBit(1),
        MultiBit(2),
        MultiBit(4, "free"),
        MultiBit(6, "free"),
        StochasticUniform(8),
        StochasticUniform(8, 128),
        StochasticUniform(4),
        StochasticUniform(3, 128),
    ]
    with contextlib.suppress(ImportError):
        codecs += [MultiBit(3, entropy="zstd"), StochasticUniform(4, 128, entropy="zstd")]
    return [payload_of(codec) for codec in codecs]


ORIGINALS = originals()

json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 2**40), max_size=5),
    st.lists(st.sampled_from([0, 1, 2, 13, 35, 455, 2**31, 2**62]), max_size=4),
    st.sampled_from(["batch", "row", "zstd", "signed", "free", "float16", "float64", "multibit", "stochastic", "raw"]),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
part_changes = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, 10**6), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("double"), st.just(0), st.just(0)),
    st.tuples(st.just("dtype"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("shape"), st.just(0), st.just(0)),
    st.tuples(st.just("drop"), st.just(0), st.just(0)),
    st.tuples(st.just("rename"), st.just(0), st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)


def changed(part: Tensor, kind: str, where: int, value: int) -> Tensor:
    if kind == "byte":
        part = part.clone()
        part.view(torch.uint8).view(-1)[where % (part.numel() * part.element_size())] ^= value
        return part
    if kind == "cut":
        return part.reshape(-1)[: where % part.numel()]
    if kind == "double":
        return torch.cat((part.reshape(-1), part.reshape(-1)))
    if kind == "dtype":
        return part.to([torch.float64, torch.int64, torch.bool, torch.float32][where])
    if kind == "shape":
        return part.reshape(-1, 1)
    return torch.empty(0, dtype=part.dtype)


@settings(max_examples=600, deadline=None)
@given(
    which=st.integers(0, len(ORIGINALS) - 1),
    meta=st.dictionaries(
        st.sampled_from(["codec", "shape", "dtype", "bits", "levels", "packing", "block", "extra"]),
        json_values,
        max_size=2,
    ),
    parts=st.lists(st.tuples(st.integers(0, 2), part_changes), max_size=2),
)
def test_damage_never_crashes_or_allocates_out_of_proportion(
    which: int, meta: dict[str, Any], parts: list[tuple[int, tuple[str, int, int]]]
) -> None:
    original = ORIGINALS[which]
    tensors = dict(original.tensors)
    for index, (kind, where, value) in parts:
        name = sorted(original.tensors)[index % len(original.tensors)]
        if name not in tensors:
            continue
        part = tensors.pop(name)
        if kind == "drop":
            continue
        if kind == "rename":
            tensors["other"] = part
        elif part.numel():
            tensors[name] = changed(part, kind, where, value)
        else:
            tensors[name] = part
    payload = Payload(tensors, {**original.meta, **meta})
    try:
        decoded = decode(payload)
    except CodecError:
        return
    if payload.meta["codec"] != "raw":
        assert list(decoded.shape) == payload.meta["shape"]
        assert decoded.isfinite().all()
        # One bit per element becomes at most a float64; zstd shrinks by no more than a known factor.
        assert decoded.numel() * decoded.element_size() <= max(64 * payload.nbytes, 1 << 26)


@pytest.mark.parametrize(
    "shape", [[2**31, 2**31], [2**40, 1], [1] * 65, [], [0, 5], [-1, 455], [True, 455], "455", [455.0]]
)
def test_absurd_shapes_are_refused(shape: Any) -> None:
    for original in ORIGINALS:
        with pytest.raises(CodecError):
            decode(Payload(dict(original.tensors), {**original.meta, "shape": shape}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_levels_and_scales_must_be_sound(value: float) -> None:
    for original in ORIGINALS:
        for name, part in original.tensors.items():
            if part.is_floating_point():
                broken = part.clone()
                broken[0] = value
                with pytest.raises(CodecError):
                    decode(Payload({**original.tensors, name: broken}, dict(original.meta)))


def test_parts_may_begin_at_any_byte() -> None:
    for original in ORIGINALS:
        moved = {}
        for name, part in original.tensors.items():
            size = part.numel() * part.element_size()
            frame = torch.zeros(size + 1, dtype=torch.uint8)
            frame[1:] = part.reshape(-1).view(torch.uint8)
            moved[name] = torch.frombuffer(
                bytearray(frame.numpy().tobytes()), dtype=part.dtype, offset=1, count=part.numel()
            )
        assert decode(Payload(moved, dict(original.meta))).equal(decode(original))
