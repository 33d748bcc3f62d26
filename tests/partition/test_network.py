"""Transmissions that share a way: who gets how much, and when they end."""

from __future__ import annotations

import pytest

from lightning_accept.partition.choose import choose_schedule
from lightning_accept.partition.model import Hop, PipelineModel, StageModel
from lightning_accept.partition.network import Flow, Network
from lightning_accept.partition.schedule import Schedule
from lightning_accept.partition.simulator import simulate


def flow(tag: str, bits: float, limit: float, *over: str, start: float = 0.0) -> Flow[str]:
    return Flow(tag, bits, limit, over, start)


def ends(network: Network[str], *flows: Flow[str]) -> dict[str, float]:
    """Begin the flows when they start; returns when each ends."""
    waiting, found = sorted(flows, key=lambda one: one.start), {}
    while waiting or network.next_end() is not None:
        end = network.next_end()
        if waiting and (end is None or waiting[0].start < end):
            network.begin(waiting.pop(0))
            continue
        assert end is not None
        found.update((one.tag, end) for one in network.ended(end))
    return found


def test_alone_a_flow_has_its_own_limit() -> None:
    assert ends(Network({"up": 100.0}), flow("a", 100, 10, "up")) == {"a": pytest.approx(10)}


def test_two_flows_halve_what_they_share_until_one_ends() -> None:
    found = ends(Network({"up": 10.0}), flow("a", 50, 10, "up"), flow("b", 100, 10, "up"))
    assert found == {"a": pytest.approx(10), "b": pytest.approx(15)}


def test_a_slow_flow_leaves_the_rest_to_the_other() -> None:
    found = ends(Network({"up": 10.0}), flow("slow", 20, 2, "up"), flow("fast", 80, 10, "up"))
    assert found == {"slow": pytest.approx(10), "fast": pytest.approx(10)}


def test_flows_that_share_nothing_do_not_meet() -> None:
    found = ends(Network({"up": 10.0, "down": 5.0}), flow("a", 100, 10, "up"), flow("b", 50, 9, "down"))
    assert found == {"a": pytest.approx(10), "b": pytest.approx(10)}


def test_the_tighter_of_two_ways_counts() -> None:
    network: Network[str] = Network({"up": 10.0, "down": 4.0})
    found = ends(network, flow("both", 40, 10, "up", "down"), flow("one", 60, 10, "up"))
    assert found == {"both": pytest.approx(10), "one": pytest.approx(10)}


def test_a_flow_that_begins_later_slows_the_first() -> None:
    found = ends(Network({"up": 10.0}), flow("a", 100, 10, "up"), flow("b", 25, 10, "up", start=5.0))
    assert found == {"a": pytest.approx(12.5), "b": pytest.approx(10)}


def chain(uplink: float, downlink: float) -> PipelineModel:
    """Three stages of next to no work, 8 bits on every hop each way at 8 bits per second."""
    stages = tuple(StageModel(1e-3, 1e-3, uplink, downlink) for _ in range(3))
    hops = (Hop(1.0, 1.0, forward_bandwidth=8.0, backward_bandwidth=8.0),) * 3
    return PipelineModel(stages, hops)


def test_shared_ways_bound_the_period() -> None:
    free, shared = chain(float("inf"), float("inf")), chain(8.0, 8.0)
    assert free.least_period() == pytest.approx(1.0)
    assert shared.least_period() == pytest.approx(2.0)
    assert choose_schedule(free).period < 1.03
    assert 2.0 * (1 - 1e-9) <= choose_schedule(shared).period < 2.06


def test_ways_that_are_wide_enough_change_nothing() -> None:
    for schedule in (Schedule(1, (1, 1), 0), Schedule(3, (2, 1), 1), Schedule(4, (6, 4), 2, 2)):
        wide = simulate(chain(1e9, 1e9), schedule)
        free = simulate(chain(float("inf"), float("inf")), schedule)
        assert wide.period == pytest.approx(free.period)
        assert wide.losses == pytest.approx(free.losses)
        assert wide.staleness == free.staleness
