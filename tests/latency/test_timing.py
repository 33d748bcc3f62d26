"""How often a sub-model is run, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.stack import Stack
from lightning_accept.latency.timing import ProfileStopped, time_span


@pytest.fixture
def stack(make_request: Callable[..., ProfileRequest]) -> Stack:
    request = make_request(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4))
    return Stack(request.layers, request.cuts, request.tensors, torch.device("cpu"))


class Recorder:
    """Passes calls on and counts them; every forward takes the next of some times."""

    def __init__(self, stack: Stack, clock: Any, seconds: list[float]) -> None:
        self.device = stack.device
        self.load, self.prepare_gradients, self._stack, self._clock = stack.load, stack.prepare_gradients, stack, clock
        self.left = list(seconds)
        self.forwards = 0

    def forward(self) -> Any:
        self.forwards += 1
        self._clock.now += self.left.pop(0)
        return self._stack.forward()

    def backward(self, done: Any) -> tuple[Tensor | None, ...]:
        self._clock.now += 0.5
        return self._stack.backward(done)


@pytest.mark.parametrize(("budget", "repeats"), [(0.001, 2), (7.6, 4), (1e6, 9)])
def test_repeats_within_the_budget(stack: Stack, ticking: Any, budget: float, repeats: int) -> None:
    clock = ticking(0.0)
    recorder = Recorder(stack, clock, [1.0] * 20)
    measured = time_span(recorder, (0, 2), budget, clock, lambda: False)  # type: ignore[arg-type]
    assert recorder.forwards == 1 + repeats
    assert (measured.span, measured.forward, measured.backward) == ((0, 2), 1.0, 0.5)


def test_median_without_the_warm_up(stack: Stack, ticking: Any) -> None:
    clock = ticking(0.0)
    recorder = Recorder(stack, clock, [100.0, 2.0, 50.0, 3.0])
    measured = time_span(recorder, (0, 1), 1e6, clock, lambda: False, max_repeats=3)  # type: ignore[arg-type]
    assert measured.forward == 3.0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_stopped_between_runs(stack: Stack, ticking: Any, after: int) -> None:
    clock = ticking(0.0)
    recorder = Recorder(stack, clock, [1.0] * 20)
    with pytest.raises(ProfileStopped):
        time_span(recorder, (0, 1), 1e6, clock, lambda: recorder.forwards >= after)  # type: ignore[arg-type]
    assert recorder.forwards == after
