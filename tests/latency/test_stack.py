"""Sub-models run as a stage runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.stack import Stack

CPU = torch.device("cpu")
MakeRequest = Callable[..., ProfileRequest]


def stack_of(request: ProfileRequest, **settings: object) -> Stack:
    return Stack(request.layers, request.cuts, request.tensors, CPU, **settings)  # type: ignore[arg-type]


def test_gradients_of_inputs_and_parameters(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> None:
    stack = stack_of(make_request(convolutions, images))
    for span, leaves in {(0, 1): 4, (1, 2): 4, (2, 4): 5, (0, 4): 11}.items():
        stack.load(span)
        done = stack.forward()
        stack.prepare_gradients(done)
        gradients = stack.backward(done)
        assert len(gradients) == len(done.wanted) == leaves
        assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
        assert all(leaf.grad is None for leaf in done.wanted)


def test_the_same_as_the_layers_by_hand(make_request: MakeRequest) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    stack = stack_of(make_request(module, torch.randn(4, 6)))
    stack.load((0, 2))
    first, second = (stack._modules[index] for index in range(2))
    x = stack._inputs[0][0]
    expected = second.run(first.run([x], training=True), training=True)[0]
    done = stack.forward()
    assert torch.equal(done.outputs[0], expected)
    stack.prepare_gradients(done)
    gradient = stack._gradients[2][0]
    plain = torch.autograd.grad(expected, done.wanted, gradient)
    assert all(torch.equal(a, b) for a, b in zip(plain, stack.backward(done), strict=True))  # type: ignore[arg-type]


def test_buffers_and_grad_mode_are_left_alone(
    convolutions: nn.Module, images: Tensor, make_request: MakeRequest
) -> None:
    request = make_request(convolutions, images)
    before = {name: tensor.clone() for name, tensor in request.tensors.items()}
    stack = stack_of(request)
    stack.load((0, 4))
    with torch.inference_mode():
        done = stack.forward()
        stack.prepare_gradients(done)
        assert len(stack.backward(done)) == 11
        assert torch.is_inference_mode_enabled()
    assert all(torch.equal(request.tensors[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(tensor, before[f"buffer/{name}"]) for name, tensor in convolutions.named_buffers())


def test_only_what_is_needed_is_held(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> None:
    request = make_request(convolutions, images)
    stack, keeping = stack_of(request), stack_of(request, keep=True)
    for one in (stack, keeping):
        one.load((0, 2))
        one.load((1, 3))
    assert (sorted(stack._modules), sorted(stack._inputs)) == ([1, 2], [1])
    assert (sorted(keeping._modules), sorted(keeping._inputs)) == ([0, 1, 2], [0, 1])
    stack.release()
    assert not stack._modules and not stack._inputs


@pytest.mark.parametrize("around", [False, True])
def test_autocast_is_the_requests_not_the_callers(
    around: bool, convolutions: nn.Module, images: Tensor, make_request: MakeRequest
) -> None:
    autocast = None if around else "bfloat16"
    stack = stack_of(make_request(convolutions, images, autocast=autocast), autocast=autocast)
    stack.load((3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        (output,) = stack.forward().outputs
    assert output.dtype == (torch.float32 if around else torch.bfloat16)


def test_channels_last(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> None:
    stack = stack_of(make_request(convolutions, images), channels_last=True)
    stack.load((1, 2))
    (output,) = stack.forward().outputs
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert not output.is_contiguous()


def test_without_anything_to_differentiate(make_request: MakeRequest) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    stack = stack_of(make_request(module, torch.randn(4, 4)))
    stack.load((0, 1))
    done = stack.forward()
    stack.prepare_gradients(done)
    assert stack.backward(done) == ()


def test_random_layers_are_noticed(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> None:
    assert stack_of(make_request(convolutions, images)).random()
    assert not stack_of(make_request(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4))).random()
