"""Measuring on a worker."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accept.commands.remote_profile import profile_worker
from lightning_accept.graph import Chain, trace
from lightning_accept.latency.profile import Profile
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.submodels import Measurement, Span, all_spans
from lightning_accept.pipeline.messages import PipelineError

LAYERS = 8


@pytest.fixture(scope="module")
def request_() -> ProfileRequest:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
    traced = trace(module, (torch.zeros(3, 4),), {})
    chain = Chain.from_trace(traced)
    assert len(chain.layers) == LAYERS
    return ProfileRequest.of(chain, traced, all_spans(LAYERS))


class Worker:
    """Measures one second per layer, and cannot run one layer if told so."""

    name = address = "http://pi:7070"

    def __init__(self, impossible: Span | None = None, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.asked: list[Span] = []
        self._impossible, self._fails = impossible, fails

    def claim(self, run: str, holder: str, link_token: str) -> dict[str, Any]:
        self.calls.append(f"claim by {holder}")
        assert run and len(link_token) > 20
        return {"device": "cpu", "threads": 4, "machine": "aarch64", "memory_free": 1, "extra": ["x"]}

    def profile(self, request: ProfileRequest, timeout: float) -> Profile:
        assert timeout == 60.0
        if self._fails:
            raise PipelineError("the worker is gone")
        self.asked += request.spans
        return Profile(tuple(self._measure(span) for span in request.spans))

    def _measure(self, span: Span) -> Measurement:
        if self._impossible is not None and span[0] <= self._impossible[0] < span[1]:
            return Measurement(*span, math.inf, math.inf)
        return Measurement(*span, float(span[1] - span[0]), 1.0)

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


def test_claims_measures_and_releases(request_: ProfileRequest) -> None:
    worker = Worker()
    shares: list[float] = []
    done = profile_worker(worker, request_, "me", 60.0, shares.append)  # type: ignore[arg-type]
    assert done.name == "http://pi:7070"
    assert [one.span for one in done.measured] == all_spans(LAYERS)
    assert done.by_span()[2, 5] == Measurement(2, 5, 3.0, 1.0)
    assert done.description == {"device": "cpu", "threads": 4, "machine": "aarch64"}
    assert sorted(worker.asked) == all_spans(LAYERS)
    assert worker.calls == ["claim by me", "release", "close"]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_what_contains_something_impossible_is_not_asked_for(request_: ProfileRequest) -> None:
    worker = Worker(impossible=(3, 4))
    done = profile_worker(worker, request_, "me", 60.0)  # type: ignore[arg-type]
    assert {one.span for one in done.measured if one.possible} == {
        span for span in all_spans(LAYERS) if not span[0] <= 3 < span[1]
    }
    assert (0, 8) not in worker.asked


def test_released_after_a_failure(request_: ProfileRequest) -> None:
    worker = Worker(fails=True)
    with pytest.raises(PipelineError, match="the worker is gone"):
        profile_worker(worker, request_, "me", 60.0)  # type: ignore[arg-type]
    assert worker.calls == ["claim by me", "release", "close"]
