"""Measuring codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accept.codecs import Codec, Payload, make_codec
from lightning_accept.codecs.cast import Raw
from lightning_accept.latency.codec_rates import CodecRate, measure_codec
from lightning_accept.latency.timing import ProfileStopped

CPU = torch.device("cpu")


def never() -> bool:
    return False


@pytest.mark.parametrize(
    ("codec", "nbytes"), [("raw", 64 * 64 * 4), ("fp16", 64 * 64 * 2), ("multibit", 64 * 64 * 2 // 8)]
)
def test_bytes_are_those_of_the_payload(codec: str, nbytes: int, ticking: Any) -> None:
    rate = measure_codec(make_codec(codec), [torch.randn(64, 64)], CPU, 0.1, ticking(), never)
    assert (rate.encode, rate.decode) == (1.0, 1.0)
    assert nbytes <= rate.nbytes <= nbytes + 20  # levels and bias


def test_several_tensors_and_none(ticking: Any) -> None:
    tensors = [torch.randn(8, 4), torch.zeros(5, dtype=torch.int64)]
    assert measure_codec(make_codec("fp16"), tensors, CPU, 0.1, ticking(), never).nbytes == 8 * 4 * 2 + 40
    assert measure_codec(make_codec("fp16"), [], CPU, 0.1, ticking(), never) == CodecRate(0.0, 0.0, 0)


def test_the_steady_state_is_measured_with_a_codec_per_tensor(ticking: Callable[[float], Any]) -> None:
    clock = ticking(0.0)
    made: list[Codec] = []

    class Slow(Raw):
        """Slow for its first two batches."""

        def __init__(self) -> None:
            self.batches = 0
            made.append(self)

        def encode(self, tensor: Tensor) -> Payload:
            self.batches += 1
            clock.now += 100.0 if self.batches <= 2 else 1.0
            return super().encode(tensor)

    rate = measure_codec(Slow(), [torch.randn(4), torch.randn(4)], CPU, 1e9, clock, never)
    assert rate.encode == 2.0
    assert [getattr(codec, "batches") for codec in made] == [0, 11, 11]  # noqa: B009


def test_stopped(ticking: Any) -> None:
    with pytest.raises(ProfileStopped):
        measure_codec(make_codec("raw"), [torch.randn(4)], CPU, 1.0, ticking(), lambda: True)
