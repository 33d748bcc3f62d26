"""Sweeps through all sub-models in two passes."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.latency.collect import write_request
from lightning_accept.latency.conditions import Condition
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.stack import Stack
from lightning_accept.latency.submodels import Measurement, all_spans
from lightning_accept.latency.sweep import main, sweep
from lightning_accept.latency.timing import ProfileStopped

SPANS = all_spans(4)


@pytest.fixture(scope="module")
def small(convolutions: nn.Module, images: Tensor, make_request: Callable[..., ProfileRequest]) -> ProfileRequest:
    return make_request(convolutions, images, spans=SPANS)


@pytest.fixture
def stack(small: ProfileRequest) -> Stack:
    return Stack(small.layers, small.cuts, small.tensors, torch.device("cpu"), keep=True)


def test_one_complete_sweep_whatever_the_time(stack: Stack, ticking: Any) -> None:
    first, second = sweep(stack, SPANS, 1e-9, ticking())
    assert [one.span for one in first] == SPANS
    assert all((one.forward, one.backward) == (1.0, 1.0) for one in first)
    assert second == []


def test_passes_by_turns_until_the_time_is_over(stack: Stack, ticking: Any) -> None:
    clock = ticking()
    shares: list[float] = []
    first, second = sweep(stack, SPANS, 200.0, clock, on_progress=shares.append)
    assert [one.span for one in first] == SPANS
    assert {one.span for one in second} <= set(SPANS)
    assert second
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_short_ones_are_run_several_times(stack: Stack, ticking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    forward = Stack.forward

    def counting(self: Stack) -> Any:
        runs.append(self._span)
        return forward(self)

    monkeypatch.setattr(Stack, "forward", counting)
    sweep(stack, [(0, 1)], 1e-9, ticking(0.001))
    assert len(runs) == 6 + 6  # a warm-up of everything, then the visit: each one run to see, five to measure
    runs.clear()
    sweep(stack, [(0, 1)], 1e-9, ticking(1.0))
    assert len(runs) == 1 + 1


@pytest.mark.parametrize(("seconds", "expected"), [(5.0, ((3.0, 1.0), (4.0, 4.0))), (7.0, ((2.0, 3.0), (5.0, 5.0)))])
def test_the_lower_median_of_a_pass(
    seconds: float, expected: Any, stack: Stack, ticking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ticking(0.0)
    times = iter([(1.0, 1.0), (3.0, 1.0), (5.0, 5.0), (2.0, 3.0), (4.0, 4.0), (1.0, 9.0), (6.0, 6.0)])

    def once(stack: Stack, clock: Any) -> tuple[float, float]:
        clock.now += 1.0
        return next(times)

    monkeypatch.setattr("lightning_accept.latency.sweep.time_once", once)
    first, second = sweep(stack, [(0, 4)], seconds, clock)
    assert (first, second) == ([Measurement(0, 4, *expected[0])], [Measurement(0, 4, *expected[1])])


def test_what_does_not_fit_is_marked_in_both_passes(
    stack: Stack, ticking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Stack.forward

    def failing(self: Stack) -> Any:
        if self._span[1] - self._span[0] == 3:
            raise MemoryError
        return forward(self)

    monkeypatch.setattr(Stack, "forward", failing)
    first, second = sweep(stack, SPANS, 1e-9, ticking())
    assert {one.span for one in first if one.forward == math.inf} == {(0, 3), (1, 4)}
    assert {one.span for one in second} == {(0, 3), (1, 4)}


def test_stopped(stack: Stack, ticking: Any) -> None:
    with pytest.raises(ProfileStopped):
        sweep(stack, SPANS, 1e9, ticking(), lambda: True)


def test_the_process(small: ProfileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.disable", lambda: None)
    file = str(tmp_path / "request.safetensors")
    write_request(small, file)
    condition = Condition("slow", call_overhead=1e-6, channels_last=True)
    config = {"condition": asdict(condition), "request": file, "seconds": 1e-9, "parent": os.getppid()}
    output = io.StringIO()
    assert main(config, output) == 0
    *progress, result = map(json.loads, output.getvalue().splitlines())
    assert progress and all(0 < line["progress"] <= 1 for line in progress)
    assert [tuple(row[:2]) for row in result["measured"]] == SPANS
    assert all(row[2] > 0 and row[3] > 0 for row in result["measured"])


def test_an_orphan_stops(small: ProfileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.disable", lambda: None)
    file = str(tmp_path / "request.safetensors")
    write_request(small, file)
    config = {"condition": asdict(Condition("plain")), "request": file, "seconds": 1e9, "parent": -1}
    with pytest.raises(ProfileStopped):
        main(config, io.StringIO())
