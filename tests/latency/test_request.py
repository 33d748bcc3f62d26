"""Requests on the wire, and nonsense from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.codecs import make_codec
from lightning_accept.latency.request import MAX_SECONDS, MAX_SPANS, ProfileRequest

MakeRequest = Callable[..., ProfileRequest]


@pytest.fixture(scope="module")
def request_(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> ProfileRequest:
    return make_request(
        convolutions,
        images,
        autocast="bfloat16",
        forward_codec=make_codec("fp16"),
        backward_codec=make_codec("stochastic"),
        codec_cuts=[1, 4],
        seconds=0.25,
        memory=1e9,
    )


def test_there_and_back(request_: ProfileRequest) -> None:
    message, tensors = request_.to_message()
    again = ProfileRequest.from_message(json.loads(json.dumps(message, allow_nan=False)), tensors)
    assert again == request_
    assert [cut[0].dtype for cut in again.cuts] == [torch.float32, *[torch.bfloat16] * 4]
    assert sorted(again.tensors) == sorted(request_.tensors)


def test_only_buffers_and_constants_travel(request_: ProfileRequest) -> None:
    assert all(name.startswith(("buffer/", "const/")) for name in request_.tensors)
    assert len(request_.tensors) == 6


def test_another_batch_size(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> None:
    request = make_request(convolutions, images, batch=9)
    assert [cut[0].shape[0] for cut in request.cuts] == [9] * 5
    with pytest.raises(ValueError, match="cannot be profiled at batch size 0"):
        make_request(convolutions, images, batch=0)


def test_a_batch_size_that_cannot_be_changed(make_request: MakeRequest) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).reshape(1, 12))

    with pytest.raises(ValueError, match="it cannot be profiled at batch size 8"):
        make_request(Fixed(), torch.randn(4, 3), batch=8)


def test_estimate(convolutions: nn.Module, images: Tensor, make_request: MakeRequest) -> None:
    request = make_request(convolutions, images)
    sizes = request.layer_bytes
    assert request.estimate((0, 2)) == sizes[0] + sizes[1] + 2 * 4 * 4 * 8 * 36
    assert request.estimate((3, 4)) == sizes[3] + 2 * 4 * 4 * 16


def change(message: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**message, name: value}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("spans", [[0, 5]], "no sub-model 0 to 5 of 4 layers"),
        ("spans", [[2, 2]], "no sub-model 2 to 2"),
        ("spans", [[-1, 2]], "a span must be two numbers"),
        ("spans", [[0.0, 2]], "a span must be two numbers"),
        ("spans", [[True, 2]], "a span must be two numbers"),
        ("spans", [[0, 1, 2]], "a span must be two numbers"),
        ("spans", "all", "'spans' must be a list"),
        ("spans", [[0, 1]] * (MAX_SPANS + 1), "more than"),
        ("layers", [], "it must have 1 to"),
        ("layers", [1], "must be a string"),
        ("cuts", [], "4 layers have 5 cuts"),
        ("cuts", [1], "a cut must be a list"),
        ("cuts", [[{}]], "a cut's value must have the fields"),
        ("seconds", 0, "seconds must be"),
        ("seconds", float("inf"), "seconds must be"),
        ("seconds", float("nan"), "seconds must be"),
        ("seconds", MAX_SECONDS * 2, "seconds must be"),
        ("seconds", "1", "seconds must be"),
        ("memory", -1, "memory must be"),
        ("memory", float("nan"), "memory must be"),
        ("autocast", "float8", "autocast must be"),
        ("autocast", 3, "autocast must be"),
        ("forward_codec", {"name": "zip"}, "there is no codec 'zip'"),
        ("forward_codec", "raw", "must be an object"),
        ("forward_codec", None, "codec_cuts need both codecs"),
        ("codec_cuts", [5], "there are 5 cuts"),
        ("codec_cuts", [1, 1], "appears twice"),
        ("codec_cuts", ["a"], "there are 5 cuts"),
        ("layer_bytes", [1], "one size per layer"),
        ("layer_bytes", [1, 2, 3, -4], "one size per layer"),
        ("surplus", 1, "its fields must be"),
    ],
)
def test_nonsense_is_refused(request_: ProfileRequest, name: str, value: Any, problem: str) -> None:
    message, tensors = request_.to_message()
    with pytest.raises(ValueError, match=problem):
        ProfileRequest.from_message(change(message, name, value), tensors)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("shape", [2**40, 2**40], "is too large"),
        ("shape", [-1], "must be sizes"),
        ("shape", [2.0], "must be sizes"),
        ("dtype", "float3", "unknown dtype"),
        ("dtype", [], "unknown dtype"),
        ("dynamic", [4], "out of range"),
        ("differentiable", 1, "wrong type"),
        ("name", None, "wrong type"),
    ],
)
def test_nonsense_in_a_cut_is_refused(request_: ProfileRequest, name: str, value: Any, problem: str) -> None:
    message, tensors = request_.to_message()
    message["cuts"][1][0] = change(message["cuts"][1][0], name, value)
    with pytest.raises(ValueError, match=problem):
        ProfileRequest.from_message(message, tensors)


def test_programs_that_do_not_fit_are_refused(request_: ProfileRequest) -> None:
    message, tensors = request_.to_message()
    with pytest.raises(ValueError, match="4 layers have 5 cuts, not 4"):
        ProfileRequest.from_message(change(message, "cuts", message["cuts"][1:]), tensors)
    with pytest.raises(ValueError, match="does not take and give what crosses its cuts"):
        ProfileRequest.from_message(change(message, "cuts", [[], *message["cuts"][1:]]), tensors)
    with pytest.raises(ValueError, match="the program lacks 'format'"):
        ProfileRequest.from_message(change(message, "layers", ["{}", *message["layers"][1:]]), tensors)
    name = next(iter(tensors))
    with pytest.raises(ValueError, match=f"the tensor {name} is missing"):
        ProfileRequest.from_message(message, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match="another shape or dtype"):
        ProfileRequest.from_message(message, {**tensors, name: torch.zeros(2, 2, 2)})
