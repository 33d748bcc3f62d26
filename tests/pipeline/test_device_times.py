"""What devices are asked, and what becomes of their answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, Trace, trace
from lightning_accept.latency.capacity import Capacity
from lightning_accept.latency.measured import Measured
from lightning_accept.latency.profile import Profile, ProfileRequest
from lightning_accept.latency.submodels import Measurement
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.device_times import DeviceTimes

LAYERS = 4
FORWARD, BACKWARD = 0.1, 0.2
"""Seconds of a layer for a whole batch."""
CODEC, MESSAGE = 0.01, 0.002
"""Seconds of one codec call, and of a message besides."""


def samples(request: ProfileRequest) -> int:
    """Per job, as a request has them."""
    size = request.cuts[0][0].shape[0]
    assert isinstance(size, int)
    return size


class Asked:
    """Answers for all devices, and keeps what they were asked."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.requests: list[tuple[int, ProfileRequest]] = []
        self.seconds_per_layer = 1.0

    def answer(self, number: int, request: ProfileRequest) -> Profile:
        self.requests.append((number, request))
        scale = self.seconds_per_layer * samples(request) / self.batch
        measured = [
            Measurement(first, stop, FORWARD * scale * (stop - first), BACKWARD * scale * (stop - first))
            for first, stop in request.spans
        ]
        codecs = ((CODEC, CODEC),) * len(request.codec_cuts)
        return Profile(tuple(measured), codecs, codecs, message=MESSAGE)


def make(
    outputs: int = 32, facts: dict[str, Any] | None = None, crowded: bool = False, counts: tuple[int, ...] = (1,)
) -> tuple[DeviceTimes, Asked]:
    """A central node and two workers, asked about four layers of which the last has so many outputs."""
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS - 1)), nn.Linear(32, outputs))
    found: Trace = trace(net, (torch.randn(16, 32),), {})
    chain = Chain.from_trace(found)
    asked = Asked(chain.batch)

    def worker(number: int) -> Any:
        return SimpleNamespace(
            name=f"http://pi-{number}", profile=lambda request, timeout: asked.answer(number, request)
        )

    pipeline: Any = SimpleNamespace(
        claimed=[worker(1), worker(2)],
        device=torch.device("cpu"),
        settings=Settings(Raw(), Raw(), Raw(), weight_prediction=True, seed=0),
    )
    times = DeviceTimes(
        Capacity,
        [facts or {}] * 3,
        lambda request, device: asked.answer(0, request),
        crowded=crowded,
    )
    times.prepare(found, chain, pipeline, None, counts)
    return times, asked


def test_devices_have_the_planner_s_numbers() -> None:
    times, asked = make(facts={"memory_free": 1000})
    times.measure([0, 2])
    assert sorted(number for number, _ in asked.requests) == [0, 2]
    assert [times.name(number) for number in range(3)] == ["central node", "http://pi-1", "http://pi-2"]
    assert times.memory(1) == 1000.0
    assert all(request.memory == 1000.0 for _, request in asked.requests)
    assert times.of_whole_batch(2) == pytest.approx(LAYERS * (FORWARD + BACKWARD))
    with pytest.raises(ValueError, match="nothing was measured"):
        times.of_whole_batch(1)


def test_a_device_that_does_not_tell_its_memory_is_not_limited() -> None:
    times, asked = make()
    times.measure([1])
    assert times.memory(1) is None
    assert asked.requests[0][1].memory is None


def test_smaller_jobs_are_measured_whatever_the_latency_model() -> None:
    times, asked = make(counts=(1, 4))
    times.measure([0])
    whole, quarter = times.sizes
    assert (type(whole.latency), type(quarter.latency)) == (Capacity, Measured)
    assert [samples(request) for _, request in asked.requests] == [16, 4]
    assert times.seconds(quarter, 0, (1, 3)) == pytest.approx(2 * (FORWARD + BACKWARD) / 4)


@pytest.mark.parametrize(
    ("facts", "crowded", "share"),
    [
        ({"threads": 1, "cores": 2.0}, False, 0.0),
        ({"threads": 1, "cores": 1.5}, False, 0.5),
        ({"threads": 1, "cores": 0.25}, False, 1.0),
        ({"threads": 1, "cores": 8.0}, True, 1.0),
        ({}, False, 1.0),
    ],
)
def test_codecs_hold_up_a_device_without_a_core_to_spare(facts: dict[str, Any], crowded: bool, share: float) -> None:
    times, _ = make(facts=facts, crowded=crowded)
    times.measure([1])
    handling = times.sizes[0].handling[1]
    expected = [share * MESSAGE, *[share * (MESSAGE + CODEC)] * LAYERS]
    for column in (
        handling.encode_forward,
        handling.decode_forward,
        handling.encode_backward,
        handling.decode_backward,
    ):
        assert list(column) == pytest.approx(expected)


def test_an_output_that_travels_raw_costs_no_codec() -> None:
    times, _ = make(outputs=2)
    times.measure([1])
    handling = times.sizes[0].handling[1]
    assert handling.encode_forward[-1] == handling.decode_backward[-1] == pytest.approx(MESSAGE)
    assert handling.encode_forward[-2] == pytest.approx(MESSAGE + CODEC)


def test_a_check_asks_for_one_stage_each_and_is_believed() -> None:
    times, asked = make()
    times.measure([0, 1, 2])
    size = times.sizes[0]
    asked.requests.clear()
    asked.seconds_per_layer = 2.0
    times.check(size, {0: (0, 1), 2: (1, 4)})
    requests = dict(asked.requests)
    assert {number: request.spans for number, request in requests.items()} == {0: ((0, 1),), 2: ((1, 4),)}
    assert not any(request.codec_cuts for request in requests.values())
    # All are at work until the slowest stage has run often enough.
    assert [request.seconds for request in requests.values()] == pytest.approx([9 * (FORWARD + BACKWARD)] * 2)
    assert times.seconds(size, 2, (1, 4)) == pytest.approx(2 * 3 * (FORWARD + BACKWARD))
    assert times.seconds(size, 1, (1, 4)) == pytest.approx(3 * (FORWARD + BACKWARD))
