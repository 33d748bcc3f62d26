"""Profiles of small models, with an injected clock."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.codecs import make_codec
from lightning_accept.latency import profile as module
from lightning_accept.latency.profile import Profile, ProfileRequest, ProfileStopped, run_profile
from lightning_accept.latency.stack import Stack
from lightning_accept.latency.submodels import Measurement

CPU = torch.device("cpu")
MakeRequest = Callable[..., ProfileRequest]


def test_results_in_the_order_of_the_request(
    convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any
) -> None:
    spans = [(0, 4), (2, 3), (1, 4), (2, 3)]
    seen: list[Measurement] = []
    profile = run_profile(make_request(convolutions, images, spans=spans), CPU, ticking(), on_measured=seen.append)
    assert [one.span for one in profile.measured] == spans
    assert [one.span for one in seen] == [(2, 3), (1, 4), (0, 4)]
    assert all((one.forward, one.backward) == (1.0, 1.0) for one in profile.measured)
    assert profile.memory_free is None or profile.memory_free > 0


def test_codecs_at_their_cuts(convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any) -> None:
    request = make_request(
        convolutions,
        images,
        spans=[(0, 1)],
        forward_codec=make_codec("fp16"),
        backward_codec=make_codec("raw"),
        codec_cuts=[0, 1, 4],
    )
    profile = run_profile(request, CPU, ticking())
    # No gradient crosses cut 0, where the model's own input would travel.
    assert profile.wire_bytes == ((4 * 3 * 36 * 2, 0), (4 * 8 * 36 * 2, 4 * 8 * 36 * 4), (4 * 4 * 2, 4 * 4 * 4))
    assert profile.encode == ((1.0, 0.0), (1.0, 1.0), (1.0, 1.0))
    assert profile.decode == ((1.0, 0.0), (1.0, 1.0), (1.0, 1.0))


def test_random_state_and_settings_are_left_alone(
    convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any
) -> None:
    request = make_request(convolutions, images)
    state = torch.get_rng_state()
    buffers = {name: tensor.clone() for name, tensor in request.tensors.items()}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        run_profile(request, CPU, ticking())
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(request.tensors[name], tensor) for name, tensor in buffers.items())
    assert torch.get_num_threads() == 1


def test_what_is_estimated_above_the_memory_is_marked(
    convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any
) -> None:
    request = make_request(convolutions, images)
    memory = request.estimate((0, 1))
    profile = run_profile(make_request(convolutions, images, memory=memory), CPU, ticking())
    assert {one.span: one.possible for one in profile.measured} == {
        span: request.estimate(span) <= memory for span in request.spans
    }
    assert not profile.measured[-1].possible


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("x")]
)
def test_what_does_not_fit_is_marked_and_what_contains_it_not_tried(
    error: Exception,
    convolutions: nn.Module,
    images: Tensor,
    make_request: MakeRequest,
    ticking: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    forward = Stack.forward

    def failing(self: Stack) -> Any:
        tried.append(self._span)
        if self._span[0] <= 1 < self._span[1]:
            raise error
        return forward(self)

    monkeypatch.setattr(Stack, "forward", failing)
    spans = [(0, 4), (0, 1), (1, 2), (1, 3), (2, 4)]
    profile = run_profile(make_request(convolutions, images, spans=spans), CPU, ticking())
    assert [one.possible for one in profile.measured] == [False, True, False, False, True]
    assert set(tried) == {(0, 1), (1, 2), (2, 4)}


def test_other_errors_are_not_swallowed(
    convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Stack) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Stack, "forward", failing)
    with pytest.raises(RuntimeError, match="no such kernel"):
        run_profile(make_request(convolutions, images), CPU, ticking())
    monkeypatch.undo()
    assert run_profile(make_request(convolutions, images), CPU, ticking()).measured  # the next one is not locked out


def test_stopped(convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any) -> None:
    seen: list[Measurement] = []
    with pytest.raises(ProfileStopped):
        run_profile(make_request(convolutions, images), CPU, ticking(), lambda: len(seen) == 2, seen.append)
    assert len(seen) == 2


def test_one_at_a_time(convolutions: nn.Module, images: Tensor, make_request: MakeRequest, ticking: Any) -> None:
    request = make_request(convolutions, images)
    stopped = threading.Event()
    results: list[object] = []

    def measure() -> None:
        try:
            results.append(run_profile(request, CPU, ticking(), stopped.is_set))
        except ProfileStopped as error:
            results.append(error)

    with module._ONE_AT_A_TIME:
        thread = threading.Thread(target=measure)
        thread.start()
        stopped.set()
        thread.join(60)
    assert isinstance(results[0], ProfileStopped)


def test_through_json() -> None:
    profile = Profile(
        (Measurement(0, 1, 0.25, 0.5), Measurement(0, 2, math.inf, math.inf)),
        ((0.1, 0.2),),
        ((0.3, 0.4),),
        ((100, 200),),
        2**40,
    )
    data = json.loads(json.dumps(profile.to_json(), allow_nan=False))
    assert data["measured"][1] == [0, 2, None, None]
    assert Profile.from_json(data) == profile
    assert Profile.from_json(Profile(()).to_json()) == Profile(())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("measured", [[0, 1, -1.0, 1.0]]),
        ("measured", [[0, 1, "1", 1.0]]),
        ("measured", [[0, 1, 1.0]]),
        ("measured", [[0.5, 1, 1.0, 1.0]]),
        ("measured", None),
        ("encode", [[None, 1.0]]),
        ("wire_bytes", [[-1, 1]]),
        ("memory_free", "much"),
    ],
)
def test_damaged_json_is_refused(name: str, value: Any) -> None:
    data = {**Profile((Measurement(0, 1, 1.0, 1.0),)).to_json(), name: value}
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json(data)
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json({key: data[key] for key in data if key != name})


def test_integer_inputs(make_request: MakeRequest, ticking: Any) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens).mean(1))

    request = make_request(Tokens(), torch.zeros(4, 5, dtype=torch.int64))
    assert all(one.possible for one in run_profile(request, CPU, ticking()).measured)
