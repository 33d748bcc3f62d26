"""Timing one sub-model: a warm-up, then the median of some repeats within a budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from lightning_accept.latency.stack import Stack
from lightning_accept.latency.submodels import Measurement, Span

Clock = Callable[[], float]

MIN_REPEATS = 2
MAX_REPEATS = 9


class ProfileStopped(RuntimeError):
    """Measuring was ended early by who asked for it."""


def time_span(
    stack: Stack,
    span: Span,
    budget: float,
    clock: Clock,
    stop: Callable[[], bool],
    max_repeats: int = MAX_REPEATS,
) -> Measurement:
    """Median seconds of forward and of backward of one sub-model.

    Args:
        stack: The layers.
        span: The sub-model.
        budget: Seconds, the warm-up counted; two repeats are made even if they take longer.
        clock: Tells seconds.
        stop: Asked before every repeat.
        max_repeats: Most repeats after the warm-up.

    Raises:
        ProfileStopped: If ``stop`` says so.
    """
    stack.load(span)
    end = clock() + budget
    forward: list[float] = []
    backward: list[float] = []
    if stop():
        raise ProfileStopped("measuring was stopped")
    time_once(stack, clock)
    while True:
        if stop():
            raise ProfileStopped("measuring was stopped")
        there, back = time_once(stack, clock)
        forward.append(there)
        backward.append(back)
        enough = len(forward) >= max_repeats or (len(forward) >= MIN_REPEATS and clock() + there + back > end)
        if enough:
            return Measurement(*span, statistics.median(forward), statistics.median(backward))


def time_once(stack: Stack, clock: Clock) -> tuple[float, float]:
    """Seconds of one forward and one backward of what is loaded."""
    began = clock()
    done = stack.forward()
    synchronise(stack.device)
    between = clock()
    stack.prepare_gradients(done)
    synchronise(stack.device)
    resumed = clock()
    stack.backward(done)
    synchronise(stack.device)
    return between - began, clock() - resumed


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
