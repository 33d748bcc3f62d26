from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accept.codecs import (
    NonFiniteError,
    Payload,
    StochasticUniform,
    codec_config,
    codec_from_config,
    decode,
    reference,
)
from lightning_accept.codecs import backend as backend_module

WIDTHS = [2, 3, 4, 5, 6, 7, 8]


def noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def steps(payload: Payload, x: Tensor) -> Tensor:
    """The step of every element, from the scales in the payload."""
    scale = payload.tensors["scale"].double()
    if "fractions" not in payload.tensors:
        return scale.expand(x.numel()).reshape(x.shape)
    block = payload.meta["block"]
    return (payload.tensors["fractions"].double() * scale).repeat_interleave(block)[: x.numel()].reshape(x.shape)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_right_on_average_and_as_noisy_as_theory_says(bits: int, block: int | None) -> None:
    x = noise((13, 64))
    errors = []
    for seed in range(200):
        payload = StochasticUniform(bits, block, seed=seed).encode(x)
        errors.append(decode(payload).double() - x.double())
    step = steps(payload, x)
    fraction = (x.double() / step) - (x.double() / step).floor()
    theory = step.square() * fraction * (1 - fraction)
    error = torch.stack(errors)
    standard_error = (theory.sum() / len(errors)).sqrt()
    assert abs(float(error.sum(dim=(1, 2)).mean())) < 4 * float(standard_error)
    assert float(error.square().mean()) == pytest.approx(float(theory.mean()), rel=0.02)
    # Element by element: none further than a step away, and the worst of all means within 5 standard errors.
    assert float((error.abs() / step).max()) <= 1 + 1e-4
    deviation = error.mean(0).abs() / (theory / len(errors)).sqrt().clamp_min(1e-6 * float(step.max()))
    assert float(deviation[theory > 1e-3 * step.square()].max()) < 5


@pytest.mark.parametrize("shape", [(16, 32), (13, 7, 5), (3, 1000), (1, 999), (5000,), (1, 2, 5, 129)], ids=str)
@pytest.mark.parametrize("block", [None, 16, 100, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_numba_and_torch_send_the_same_bytes(
    bits: int, block: int | None, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    from lightning_accept.codecs import fast

    one, other = StochasticUniform(bits, block, seed=7), StochasticUniform(bits, block, seed=7)
    for call in range(2):
        x = noise(shape, call) * 10.0 ** (3 * call)
        monkeypatch.setattr(backend_module, "_chosen", fast)
        a = one.encode(x)
        a_values = decode(a)
        monkeypatch.setattr(backend_module, "_chosen", reference)
        b = other.encode(x)
        assert a.meta == b.meta
        assert a.tensors.keys() == b.tensors.keys()
        assert all(part.equal(b.tensors[name]) for name, part in a.tensors.items())
        assert decode(b).equal(a_values)
        assert a.nbytes == one.wire_bytes(shape, 4)


@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_the_stream_is_the_same_everywhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed figures: the second call with seed 1 must give these codes on every machine."""
    if kind == "numba":
        pytest.importorskip("numba")
    from lightning_accept.codecs import fast

    monkeypatch.setattr(backend_module, "_chosen", fast if kind == "numba" else reference)
    codec = StochasticUniform(8, seed=1)
    x = torch.full((1, 256), 0.5)
    x[0, 0] = 127
    codec.encode(x)
    assert codec.encode(x).tensors["codes"][0, 1:25].tolist() == EXPECTED


EXPECTED = [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block", [None, 128])
def test_the_error_is_told(block: int | None) -> None:
    x = torch.randn(64, 4000, generator=torch.Generator().manual_seed(0))
    codec = StochasticUniform(4, block)
    y = decode(codec.encode(x))
    assert codec.last_error == pytest.approx(float((y - x).square().sum() / x.square().sum()), rel=0.05)


@pytest.mark.usefixtures("kernels")
def test_sizes_and_layouts() -> None:
    x = noise((13, 40))
    eight = StochasticUniform(8).encode(x).tensors["codes"]
    assert (eight.dtype, tuple(eight.shape)) == (torch.int8, (13, 40))
    four = StochasticUniform(4).encode(x)
    assert (four.tensors["codes"].dtype, tuple(four.tensors["codes"].shape)) == (torch.uint8, (7, 40))
    assert four.nbytes == 7 * 40 + 4
    assert StochasticUniform(4, 128).encode(x).nbytes == 7 * 40 + 4 + 2 * 5
    assert StochasticUniform(3).encode(x).nbytes == 3 * 2 * 40 + 4


@pytest.mark.usefixtures("kernels")
def test_four_bits_put_two_rows_in_a_byte_after_adding_eight() -> None:
    x = torch.zeros(4, 64)
    x[0], x[1], x[2], x[3] = 7.0, -7.0, 0.0, 3.0
    codes = StochasticUniform(4).encode(x).tensors["codes"]
    assert codes[0].tolist() == [(15 << 4) | 1] * 64
    assert (codes[1] >> 4).tolist() == [8] * 64


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_constant_and_zero_tensors_come_back_exactly(bits: int, block: int | None) -> None:
    codec = StochasticUniform(bits, block)
    for value in (0.0, 0.3, -1234.5, 1e-20, 3e30):
        x = torch.full((17, 257), value)
        torch.testing.assert_close(decode(codec.encode(x)), x, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("kernels")
def test_blocks_keep_small_values_beside_large_ones() -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    x[0, :128] *= 1e5
    y = decode(StochasticUniform(4, 128).encode(x))
    assert float((y - x)[1:].square().sum() / x[1:].square().sum()) < 0.1
    assert float((decode(StochasticUniform(4).encode(x)) - x)[1:].square().sum() / x[1:].square().sum()) > 0.9


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("block", [None, 16, 128])
def test_no_value_leaves_the_range(bits: int, block: int | None) -> None:
    x = noise((16, 1000)) * torch.logspace(-20, 0, 16000).reshape(16, 1000)
    payload = StochasticUniform(bits, block).encode(x)
    y = decode(payload)
    assert float(((y.double() - x.double()).abs() / steps(payload, x).clamp_min(1e-300)).max()) <= 1 + 1e-4


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_float_dtype_and_memory_layout(dtype: torch.dtype) -> None:
    x = noise((9, 6, 10, 12)).to(dtype)
    expected = decode(StochasticUniform(4, 128).encode(x))
    assert expected.dtype == dtype
    other = x.contiguous(memory_format=torch.channels_last)
    assert decode(StochasticUniform(4, 128).encode(other)).equal(expected)
    other = torch.stack((x, x), -1)[..., 0]
    assert decode(StochasticUniform(4, 128).encode(other)).equal(expected)


@pytest.mark.usefixtures("kernels")
def test_half_precision_never_becomes_infinite() -> None:
    x = torch.full((16, 64), 65504.0).half()
    x[1:] = noise((15, 64)).half()
    for bits in WIDTHS:
        for block in (None, 128):
            assert decode(StochasticUniform(bits, block).encode(x)).isfinite().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    x = noise((16, 300))
    x[7, 123] = bad
    for block in (None, 128):
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            StochasticUniform(8, block).encode(x)


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(1.5),
        torch.zeros(0, 7),
        torch.randn(255),
        torch.arange(1024).reshape(32, 32),
        torch.arange(1024).reshape(32, 32) % 3 == 0,
        torch.full((32, 32), 1e-30),
        torch.full((32, 32), 3e38),
        torch.full((32, 32), 1e300, dtype=torch.float64),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
@pytest.mark.usefixtures("kernels")
def test_what_cannot_be_quantised_well_goes_as_it_is(x: Tensor) -> None:
    codec = StochasticUniform(8)
    payload = codec.encode(x)
    assert payload.meta["codec"] == "raw"
    assert decode(payload).equal(x)
    assert codec.last_error == 0.0


@pytest.mark.usefixtures("kernels")
def test_seed_and_call_decide_the_rounding() -> None:
    x = noise((16, 64))

    def codes(codec: StochasticUniform) -> Tensor:
        return codec.encode(x).tensors["codes"]

    codec = StochasticUniform(seed=3)
    first, second = codes(codec), codes(codec)
    assert not first.equal(second)
    again = codec.fresh()
    assert isinstance(again, StochasticUniform)
    assert codes(again).equal(first)
    assert codes(again).equal(second)
    assert not codes(StochasticUniform(seed=4)).equal(first)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("block", [None, 128])
def test_zstd_changes_no_value(bits: int, block: int | None) -> None:
    pytest.importorskip("zstandard")
    x = noise((32, 500)).relu()
    x[:, 100:] = 0
    plain, packed = StochasticUniform(bits, block).encode(x), StochasticUniform(bits, block, entropy="zstd").encode(x)
    assert packed.meta["packing"] == "zstd"
    assert packed.nbytes < plain.nbytes
    assert decode(packed).equal(decode(plain))


@pytest.mark.usefixtures("kernels")
def test_bits_may_change_between_calls() -> None:
    x = noise((16, 64))
    codec = StochasticUniform(8)
    codec.encode(x)
    codec.bits = 4
    payload = codec.encode(x)
    assert payload.meta["bits"] == 4
    assert payload.nbytes == codec.wire_bytes((16, 64), 4)


def test_arguments_are_checked_and_travel() -> None:
    wrong: list[Any] = [1, 9, 4.0, True, None]
    for bits in wrong:
        with pytest.raises(ValueError, match="bits must be an integer from 2 to 8"):
            StochasticUniform(bits=bits)
    wrong = [0, 8, -1, 1.5, True, 1 << 30]
    for block in wrong:
        with pytest.raises(ValueError, match="block must be None or an integer"):
            StochasticUniform(block=block)
    codec = StochasticUniform(4, 128, seed=9)
    assert codec.fresh().config() == codec_from_config(codec_config(codec)).config() == codec.config()
