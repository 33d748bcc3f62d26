"""PipelineMetrics: differences between two looks, and nothing invented where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accept.callbacks.pipeline_metrics import PipelineMetrics


def link(peer: int, packets: int, **figures: Any) -> dict[str, Any]:
    usual = {"encode_seconds": 0.0, "send_seconds": 0.0, "last_error": None, "bandwidth": None}
    return {
        "peer": peer,
        "packets": packets,
        "payload_bytes": 10 * packets,
        "raw_bytes": 40 * packets,
        **usual,
        **figures,
    }


def stage(number: int, jobs: int, seconds: float, term: int = 1, **figures: Any) -> dict[str, Any]:
    return {
        "stage": number,
        "term": term,
        "layers": ["a", "b"],
        "jobs": jobs,
        "forward_seconds": seconds,
        "backward_seconds": 2 * seconds,
        "step_seconds": 0.0,
        "waiting_seconds": seconds,
        "staleness": 3,
        "links": {"down": link((number + 1) % 3, jobs), "up": link((number - 1) % 3, jobs)},
        **figures,
    }


def test_what_happened_between_two_looks() -> None:
    metrics = PipelineMetrics()
    metrics.update([stage(0, 10, 10.0, received={})])
    found = metrics.update([stage(0, 14, 12.0, received={}, memory=1000, queued=2)])
    assert found["accept/stage_0/forward_seconds"] == 0.5
    assert found["accept/stage_0/backward_seconds"] == 1.0
    assert found["accept/stage_0/busy"] == pytest.approx(0.75)
    assert found["accept/stage_0/staleness"] == 3
    assert found["accept/stage_0/layers"] == 2
    assert found["accept/stage_0/memory_bytes"] == 1000
    assert found["accept/stage_0/queued"] == 2
    assert found["accept/link_0_1/activation_bytes"] == 10
    assert found["accept/link_0_2/gradient_raw_bytes"] == 40


def test_figures_begin_anew_with_a_deployment() -> None:
    metrics = PipelineMetrics()
    metrics.update([stage(1, 100, 100.0)])
    assert metrics.update([stage(1, 2, 1.0, term=2)])["accept/stage_1/forward_seconds"] == 0.5


def test_no_job_no_times() -> None:
    metrics = PipelineMetrics()
    metrics.update([stage(1, 5, 5.0)])
    found = metrics.update([stage(1, 5, 5.0)])
    assert not [name for name in found if "seconds" in name or "busy" in name or "bytes" in name]


def test_a_worker_without_a_stage_tells_nothing() -> None:
    assert not [name for name in PipelineMetrics().update([stage(0, 1, 1.0), {}]) if "stage_1" in name]


def test_speeds_and_errors_where_they_are_known() -> None:
    links = {"down": link(1, 1, bandwidth=8e6, last_error=0.01), "up": link(2, 1)}
    received = {"down": {"bandwidth": 2e6}, "up": {"bandwidth": None}}
    found = PipelineMetrics().update(
        [stage(0, 1, 1.0, links=links, received=received), stage(1, 1, 1.0), stage(2, 1, 1.0)]
    )
    assert found["accept/link_0_1/activation_bits_per_second"] == 8e6
    assert found["accept/link_0_1/activation_quantisation_error"] == 0.01
    assert found["accept/link_2_0/activation_bits_per_second"] == 2e6
    assert "accept/link_1_0/gradient_bits_per_second" not in found
