"""Made-up tensors stay ordinary and disturb nobody."""

from __future__ import annotations

import pytest
import torch

from lightning_accept.graph import CutValue
from lightning_accept.graph.program import ParameterInfo
from lightning_accept.latency.stand_in import make_generator, make_like, make_parameter, make_values

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(64, 128), (32, 16, 3, 3), (48, 1, 5)])
def test_weights_keep_the_scale_of_what_passes_a_relu(shape: tuple[int, ...]) -> None:
    weight = make_parameter("net.weight", ParameterInfo(shape, torch.float32), CPU, make_generator())
    fan_in = weight[0].numel()
    assert weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.15)


def test_scales_are_one_and_biases_zero() -> None:
    info = ParameterInfo((8,), torch.float64)
    assert torch.equal(make_parameter("bn.weight", info, CPU, make_generator()), torch.ones(8, dtype=torch.float64))
    assert not make_parameter("bn.bias", info, CPU, make_generator()).any()
    assert not make_parameter("lstm.bias_ih_l0", info, CPU, make_generator()).any()
    index = make_parameter("index", ParameterInfo((2, 2), torch.int64), CPU, make_generator())
    assert index.dtype == torch.int64 and not index.any()


def test_a_deep_stack_neither_vanishes_nor_overflows() -> None:
    generator = make_generator()
    x = torch.randn(16, 64, generator=generator)
    for _ in range(60):
        x = torch.relu(x @ make_parameter("w", ParameterInfo((64, 64), torch.float32), CPU, generator).T)
    assert torch.isfinite(x).all()
    assert x.abs().max() > 1e-4


def test_values_of_a_cut() -> None:
    values = [
        CutValue("a", (4, 3), torch.float32),
        CutValue("b", (2,), torch.bfloat16),
        CutValue("c", (5,), torch.int64),
        CutValue("d", (), torch.bool),
    ]
    a, b, c, d = make_values(values, CPU, make_generator())
    assert (a.shape, b.dtype) == ((4, 3), torch.bfloat16)
    assert a.any() and b.any()
    assert (c.dtype, d.dtype, d.shape) == (torch.int64, torch.bool, ())
    assert not c.any() and not d


def test_gradients_have_the_layout_of_the_output() -> None:
    output = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    gradient = make_like(output, make_generator())
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert gradient.std() > 0.5


def test_the_random_state_of_others_is_left_alone() -> None:
    before = torch.get_rng_state()
    weight = make_parameter("w", ParameterInfo((4, 4), torch.float32), CPU, make_generator())
    make_values([CutValue("a", (4, 3), torch.float32)], CPU, make_generator())
    make_like(weight, make_generator())
    assert torch.equal(torch.get_rng_state(), before)
