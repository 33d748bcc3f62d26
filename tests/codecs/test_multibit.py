from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accept.codecs import MultiBit, NonFiniteError, Payload, codec_config, codec_from_config, decode

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = [(16, 32), (13, 7, 5), (128, 320, 4, 4), (8, 3, 11, 11), (257, 3), (64, 16, 8, 8)]


def reference(batches: list[np.ndarray], bits: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """The paper's method in float64: signs [k, n, ...], a, decoded values, and how far each element is from a tie."""
    a = np.zeros(bits)
    for number, x in enumerate(batches):
        x = x.astype(np.float64)
        if number == 0:
            rest, signs, margin = x.copy(), [], np.full(x.shape, np.inf)
            for i in range(bits):
                margin = np.minimum(margin, np.abs(rest))
                signs.append(np.where(rest >= 0, 1.0, -1.0))
                a[i] = np.abs(rest).mean()
                rest = rest - a[i] * signs[-1]
            matrix = np.stack(signs)
        else:
            choices = np.array([[1.0 if (code >> i) & 1 else -1.0 for i in range(bits)] for code in range(1 << bits)])
            levels = choices @ a
            nearest = np.full(x.shape, np.inf)
            second = np.full(x.shape, np.inf)
            which = np.zeros(x.shape, np.int64)
            for code, level in enumerate(levels):
                distance = np.abs(x - level)
                second = np.minimum(second, np.maximum(nearest, distance))
                which = np.where(distance < nearest, code, which)
                nearest = np.minimum(nearest, distance)
            margin = second - nearest
            matrix = np.moveaxis(choices[which], -1, 0)
            flat = matrix.reshape(bits, -1)
            a = np.linalg.solve(flat @ flat.T, flat @ x.reshape(-1))
        approximation = np.tensordot(a, matrix, 1)
        yield matrix, a.copy(), approximation - (approximation - x).mean(), margin


def sent_bits(payload: Payload, shape: tuple[int, ...], bits: int) -> np.ndarray:
    planes = payload.tensors["planes"].numpy().reshape(bits, -(-shape[0] // 8), *shape[1:])
    return np.unpackbits(planes, axis=1)[:, : shape[0]]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_batches_equal_the_paper_in_float64(shape: tuple[int, ...], bits: int) -> None:
    rng = np.random.default_rng(bits)
    batches = [(rng.standard_normal(shape) * (1 + 0.1 * t) + 0.1 * t).astype(np.float32) for t in range(3)]
    codec = MultiBit(bits=bits)
    for x, (signs, a, decoded, margin) in zip(batches, reference(batches, bits), strict=True):
        payload = codec.encode(torch.from_numpy(x))
        clear = margin > 1e-5
        assert clear.mean() > 0.99
        np.testing.assert_array_equal((sent_bits(payload, shape, bits) == (signs > 0))[:, clear], True)
        np.testing.assert_allclose(payload.tensors["levels"][:bits].numpy(), a, atol=5e-5)
        received = decode(payload).numpy()
        np.testing.assert_allclose(received[clear], decoded[clear], atol=1e-4)
        assert codec.last_error == pytest.approx(((received - x) ** 2).sum() / (x**2).sum(), rel=1e-3)
        assert payload.nbytes * 8 == 32 * bits + 8 * bits * math.ceil(shape[0] / 8) * math.prod(shape[1:]) + 32
        assert payload.nbytes == codec.wire_bytes(shape, 4)


def test_the_papers_example_makes_54() -> None:
    column = torch.tensor([-1.0, -1, 1, 1, -1, 1, 1, -1])
    payload = MultiBit(bits=1).encode(column[:, None].repeat(1, 32))
    assert payload.tensors["planes"].tolist() == [[54] * 32]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(16, 32), (13, 7, 5), (9, 1100), (300,), (3, 111), (1, 999), (1100, 1)], ids=str)
def test_free_levels_are_the_means_of_their_elements(shape: tuple[int, ...], bits: int) -> None:
    codec = MultiBit(bits=bits, levels="free")
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(4):
        x = torch.randn(shape, generator=generator, dtype=torch.float64).relu()
        payload = codec.encode(x)
        levels = payload.tensors["levels"].double()
        assert len(levels) == 1 << bits
        assert payload.nbytes == codec.wire_bytes(shape, 8)
        y = decode(payload)
        assert y.dtype == torch.float64
        assert y.shape == x.shape
        for level in levels.unique():
            where = y == level
            if where.any():
                assert float(x[where].mean()) == pytest.approx(float(level), abs=1e-4)
        error = float((x - y).square().sum() / x.square().sum())
        assert codec.last_error == pytest.approx(error, rel=2e-2, abs=1e-6)
        errors.append(error)
    assert max(errors) < {1: 0.3, 2: 0.1, 3: 0.03, 4: 0.01, 6: 1e-3, 8: 1e-3}[bits]


def test_free_levels_fit_one_sided_values_better() -> None:
    x = torch.randn(64, 32, 8, 8, generator=torch.Generator().manual_seed(0)).clamp(0, 6)
    errors = {}
    for levels in ("signed", "free"):
        codec = codec_from_config({"name": "multibit", "bits": 2, "levels": levels})
        for _ in range(10):
            codec.encode(x)
        errors[levels] = codec.last_error
    assert errors["free"] < errors["signed"] / 2


def test_free_levels_follow_values_that_shrink_suddenly() -> None:
    generator = torch.Generator().manual_seed(0)
    codec = MultiBit(bits=4, levels="free")
    for scale in (1.0, 1.0, 0.01, 0.01):
        codec.encode(torch.randn(64, 64, generator=generator) * scale)
    assert codec.last_error is not None
    assert codec.last_error < 0.02


def test_levels_adapt_from_batch_to_batch() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    codec = MultiBit(bits=4)
    errors = []
    for _ in range(20):
        codec.encode(x)
        errors.append(codec.last_error)
    assert errors[-1] < errors[0] / 2


@pytest.mark.parametrize("levels", ["signed", "free"])
def test_a_new_epoch_starts_anew_only_where_asked(levels: Any) -> None:
    batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    carried, fresh = MultiBit(2, levels), MultiBit(2, levels, reinit_every_epoch=True)
    for codec in (carried, fresh):
        codec.encode(batches[0])
        codec.encode(batches[1])
        codec.start_epoch()
    restarted = fresh.encode(batches[2]).tensors["levels"]
    assert restarted.equal(MultiBit(2, levels).encode(batches[2]).tensors["levels"])
    assert not restarted.equal(carried.encode(batches[2]).tensors["levels"])


def test_other_bits_start_new_levels() -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    codec = MultiBit(2)
    codec.encode(x)
    codec.bits = 3
    assert codec.encode(x).tensors["planes"].equal(MultiBit(3).encode(x).tensors["planes"])
    assert codec.config()["bits"] == 3


@pytest.mark.parametrize("levels", ["signed", "free"])
@pytest.mark.parametrize("value", [0.0, 3.25, -1e-6])
def test_constant_tensors_come_back_exactly(levels: Any, value: float) -> None:
    codec = MultiBit(2, levels)
    x = torch.full((13, 40), value)
    for _ in range(3):
        torch.testing.assert_close(decode(codec.encode(x)), x, rtol=1e-6, atol=1e-13)
        assert codec.last_error == pytest.approx(0, abs=1e-6)
    wild = torch.randn(13, 40, generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        codec.encode(wild)
    assert codec.last_error is not None
    assert codec.last_error < 0.2


@pytest.mark.parametrize("levels", ["signed", "free"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_float_dtype_and_memory_layout(dtype: torch.dtype, levels: Any) -> None:
    x = torch.randn(9, 6, 10, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = decode(MultiBit(2, levels).encode(x))
    assert expected.dtype == dtype
    assert float((expected.double() - x.double()).square().sum() / x.double().square().sum()) < 0.25
    for other in (
        x.contiguous(memory_format=torch.channels_last),
        x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),
        torch.stack((x, x), -1)[..., 0],
        x.clone().requires_grad_(),
    ):
        assert decode(MultiBit(2, levels).encode(other)).equal(expected)


@pytest.mark.parametrize("levels", ["signed", "free"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_forgotten(levels: Any, bad: float) -> None:
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[7, 123] = bad
    codec, other = MultiBit(2, levels), MultiBit(2, levels)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        codec.encode(broken)
    for _ in range(2):
        assert codec.encode(x).tensors["levels"].equal(other.encode(x).tensors["levels"])
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            codec.encode(broken)


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(1.5),
        torch.zeros(0, 7),
        torch.zeros(4, 0, 3),
        torch.randn(255),
        torch.randn(17, 15, dtype=torch.float64),
        torch.arange(1024).reshape(32, 32),
        torch.arange(1024).reshape(32, 32) % 3 == 0,
        torch.full((32, 32), 1e30),
        torch.full((32, 32), 1e300, dtype=torch.float64),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
@pytest.mark.parametrize("levels", ["signed", "free"])
def test_what_cannot_be_quantised_well_goes_as_it_is(x: Tensor, levels: Any) -> None:
    codec = MultiBit(2, levels)
    payload = codec.encode(x)
    assert payload.meta["codec"] == "raw"
    assert decode(payload).equal(x)
    assert codec.last_error == 0.0


def test_raw_when_it_would_not_become_smaller() -> None:
    codec = MultiBit(8, "free")
    x = torch.randn(16, 17).half()
    assert codec.encode(x).meta["codec"] == "raw"
    assert codec.wire_bytes((16, 17), 2) == 16 * 17 * 2
    assert codec.wire_bytes((), 4) == 4
    assert codec.wire_bytes((0, 3), 4) == 0


def test_half_precision_never_becomes_infinite() -> None:
    x = torch.full((16, 32), 65504.0).half()
    x[::2] = -65000
    codec = MultiBit(3)
    for _ in range(3):
        assert decode(codec.encode(x)).isfinite().all()


def test_a_payload_is_not_touched_by_the_next_encode() -> None:
    codec = MultiBit(2, "free")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).half()
    first = codec.encode(x)
    before = decode(first).clone()
    codec.encode(-x)
    assert decode(first).equal(before)


@pytest.mark.parametrize("levels", ["signed", "free"])
def test_zstd_shrinks_the_planes_and_changes_no_value(levels: Any) -> None:
    pytest.importorskip("zstandard")
    x = torch.randn(32, 8, 16, 16, generator=torch.Generator().manual_seed(0)).relu()
    x[:, 4:] = 0
    plain, packed = MultiBit(2, levels), MultiBit(2, levels, entropy="zstd")
    for _ in range(2):
        expected, payload = plain.encode(x), packed.encode(x)
        assert payload.meta["packing"] == "zstd"
        assert payload.nbytes < 0.8 * expected.nbytes
        assert decode(payload).equal(decode(expected))


def test_zstd_is_left_out_where_it_does_not_help() -> None:
    pytest.importorskip("zstandard")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    payload = MultiBit(1, entropy="zstd").encode(x)
    assert payload.meta["packing"] == "row"
    assert decode(payload).equal(decode(MultiBit(1).encode(x)))


def test_arguments_are_checked_and_travel() -> None:
    for bits in (0, 9, 2.0, True, None):
        with pytest.raises(ValueError, match="bits must be an integer from 1 to 8"):
            MultiBit(bits=bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'signed' or 'free'"):
        MultiBit(levels="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="None or 'zstd'"):
        MultiBit(entropy="lz4")  # type: ignore[arg-type]
    codec = MultiBit(3, "free", reinit_every_epoch=True)
    assert codec.fresh().config() == codec_from_config(codec_config(codec)).config() == codec.config()
