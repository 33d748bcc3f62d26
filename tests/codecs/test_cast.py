from __future__ import annotations

import math

import pytest
import torch

from lightning_accept.codecs import Bf16, Codec, CodecError, Fp16, NonFiniteError, Payload, Raw, decode


@pytest.mark.parametrize("codec", [Raw(), Fp16(), Bf16()], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5)], ids=str)
def test_shape_and_dtype_come_back(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64).mul(4).to(dtype)
    payload = codec.encode(x)
    y = decode(payload)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    torch.testing.assert_close(y, x, rtol=2.0**-8, atol=1e-6)
    if dtype.is_floating_point:
        assert payload.nbytes == codec.wire_bytes(shape, dtype.itemsize)
    else:
        assert y.equal(x)


@pytest.mark.parametrize("codec", [Fp16(), Bf16()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(codec: Codec, bad: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        codec.encode(torch.tensor([1.0, bad]))


def test_what_does_not_fit_is_named_with_its_cure() -> None:
    with pytest.raises(NonFiniteError, match="use 'bf16' or 'raw'"):
        Fp16().encode(torch.tensor([1e6]))


def test_damaged_payloads_are_refused() -> None:
    data = torch.zeros(3)
    for payload in (
        Payload({"data": data, "more": data}, {"codec": "raw"}),
        Payload({"data": data}, {"codec": "fp16", "dtype": "float32"}),
        Payload({"data": data.half()}, {"codec": "fp16", "dtype": "int64"}),
        Payload({"data": data.half()}, {"codec": "fp16", "dtype": ["float32"]}),
        Payload({}, {"codec": "bf16", "dtype": "float32"}),
    ):
        with pytest.raises(CodecError):
            decode(payload)
