"""What the central node knows of all stages' norms, and what a stage makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_accept.pipeline.clipping import CentralClipping, estimate, scale_for, squared_norm, wants_norms
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.pipeline.stage import NonFiniteActivation


def test_norm_and_factor_are_pytorchs() -> None:
    gradients = [torch.randn(3, 4), torch.randn(5)]
    parameters = [torch.zeros_like(gradient).requires_grad_() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    squared = squared_norm(gradients)
    assert math.sqrt(squared) == pytest.approx(float(norm))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * scale_for(0.5, squared))
    assert squared_norm([]) == 0.0
    assert scale_for(1.0, 0.0) == 1.0


def test_a_stage_not_heard_of_counts_as_much_as_the_largest() -> None:
    assert estimate({2: 4.0}, 3) == 12.0
    assert estimate({0: 1.0, 2: 4.0}, 3) == 9.0
    assert estimate({0: 1.0, 1: 2.0, 2: 4.0}, 3) == 7.0
    assert estimate({}, 3) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(NonFiniteActivation, match="norm of the gradients is not finite"):
        scale_for(1.0, value)


def test_with_one_batch_in_flight_the_factor_is_that_of_all_stages() -> None:
    clipping = CentralClipping()
    clipping.deployed(3, synchronous=True)
    clipping.learn({1: [16.0, 1.0], 2: [0.0, 3.0]})
    assert clipping.by_norm(0, 1.0, own=9.0) == pytest.approx(0.2)
    assert clipping.by_norm(0, 1.0, own=9.0 * 0.2**2) == pytest.approx(1.0, abs=1e-5)
    clips = clipping.take()
    assert [clip["optimizer"] for clip in clips] == [0, 0]
    assert clips[0]["scale"] == pytest.approx(0.2)
    assert not wants_norms(clips)
    assert clipping.take() == []


def test_gradients_that_are_dropped_are_not_clipped() -> None:
    clipping = CentralClipping()
    clipping.deployed(2, synchronous=True)
    clipping.learn({1: [16.0, 4.0]})
    clipping.by_value(0, 0.1)
    clipping.by_value(1, 0.1)
    clipping.zeroed(0)
    assert clipping.take() == [{"optimizer": 1, "value": 0.1}]
    assert clipping.by_norm(0, 1.0, own=0.0) == 1.0


def test_in_flight_a_stage_is_told_what_is_known_of_the_others() -> None:
    clipping = CentralClipping()
    clipping.deployed(3, synchronous=False)
    assert clipping.by_norm(0, 1.0, own=0.0) == 1.0
    assert clipping.take() == [{"optimizer": 0, "norm": 1.0, "outside": 0.0, "known": {}}]
    clipping.learn({0: [1.0], 1: [4.0], 2: [10.0]})
    assert clipping.by_norm(0, 1.0, own=1.0) == pytest.approx(0.25, abs=1e-6)
    (clip,) = clipping.take()
    assert clip == {"optimizer": 0, "norm": 1.0, "outside": 1.0, "known": {0: 1.0, 1: 4.0, 2: 10.0}}
    assert wants_norms([clip])
    clipping.deployed(2, synchronous=False)
    clipping.by_norm(0, 1.0, own=1.0)
    with pytest.raises(PipelineError, match="once in a step"):
        clipping.by_value(0, 0.1)
    assert clipping.take()[0]["known"] == {}, "norms of other stages mean nothing after a deployment"
