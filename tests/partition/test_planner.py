"""The planner against brute force, its answer's fields, and its errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from lightning_accept.partition.handling import Handling
from lightning_accept.partition.link import Link
from lightning_accept.partition.plan import PlanError
from lightning_accept.partition.planner import balanced, plan_partition
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.times import AdditiveTimes, SubModelTimes, TableTimes

Chain = tuple[tuple[int, int], ...]
"""Device and first layer of every stage."""


def chains(problem: Problem) -> Iterator[Chain]:
    """Every partition that the rules about counts allow."""
    workers = range(1, len(problem.devices))
    for count in range(problem.share, len(problem.devices)) if problem.may_leave_out else [len(workers)]:
        for used in itertools.combinations(workers, count):
            for cuts in itertools.combinations(range(problem.central_minimum, problem.layers), count):
                yield ((0, 0), *zip(used, cuts, strict=True))


def memory(problem: Problem, device: int, first: int, stop: int) -> float:
    chosen = problem.devices[device]
    weights = sum(problem.weight_bytes[first:stop]) if problem.weight_bytes else 0
    activations = sum(problem.activation_bytes[first:stop]) if problem.activation_bytes else 0
    return weights * (chosen.weight_versions + problem.state_copies) + activations * chosen.in_flight


def busy(link: Link, forward: list[int], backward: list[int]) -> float:
    """Seconds for which the messages of one batch keep a link busy."""
    down = sum(8 * count / link.forward_bandwidth for count in forward)
    up = sum(8 * count / link.backward_bandwidth for count in backward)
    return max(down, up) if link.full_duplex else down + up


def way(problem: Problem, source: int, target: int) -> Link:
    link, there, back = problem.link(source, target), problem.devices[source], problem.devices[target]
    return Link(
        min(link.forward_bandwidth, there.uplink, back.downlink),
        min(link.backward_bandwidth, back.uplink, there.downlink),
        link.forward_latency,
        link.backward_latency,
        link.full_duplex,
    )


def evaluate(problem: Problem, chain: Chain) -> tuple[float, int]:
    """Period and bytes of one partition, by the definition; infinite if a limit is broken."""
    down, up, layers = problem.forward_bytes, problem.backward_bytes, problem.layers
    stops = [first for _, first in chain[1:]] + [layers]
    parts = [problem.loss_time]
    for (device, first), stop in zip(chain, stops, strict=True):
        if memory(problem, device, first, stop) > problem.devices[device].memory:
            return math.inf, 0
        times = problem.devices[device].times
        seconds = times.forward(first, stop) + times.backward(first, stop)
        if (handles := problem.devices[device].handling) is not None and len(chain) > 1:
            seconds += handles.encode_forward[stop] + handles.decode_backward[stop]
            after = first if device else layers
            seconds += handles.decode_forward[after] + handles.encode_backward[after]
        parts.append(seconds + (0 if device else problem.loss_time))
        if len(chain) > 1:
            start = first if device else layers
            place = problem.devices[device]
            parts.append(8 * (down[stop] + up[start]) / place.uplink)
            parts.append(8 * (up[stop] + down[start]) / place.downlink)
    total = 0
    if len(chain) == 2:
        worker, cut = chain[1]
        parts.append(busy(way(problem, 0, worker), [down[cut], up[layers]], [up[cut], down[layers]]))
        total = down[cut] + up[cut] + down[layers] + up[layers]
    elif len(chain) > 2:
        for (source, _), (target, cut) in itertools.pairwise([*chain, (0, layers)]):
            parts.append(busy(way(problem, source, target), [down[cut]], [up[cut]]))
            total += down[cut] + up[cut]
    return max(parts), total


def brute_force(problem: Problem) -> tuple[float, int, tuple[tuple[int, int], ...]] | None:
    """The best by (period, bytes, cuts and devices); None if nothing is possible."""
    answers = []
    for chain in chains(problem):
        period, total = evaluate(problem, chain)
        if math.isfinite(period):
            answers.append((period, total, tuple((cut, device) for device, cut in chain)))
    return min(answers, default=None)


def random_times(rng: np.random.Generator, layers: int, whole: bool) -> SubModelTimes:
    def draw(size: int | tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 7, size).astype(float) if whole else rng.uniform(0.1, 4, size)

    if rng.random() < 0.5:
        return AdditiveTimes(draw(layers), draw(layers) if rng.random() < 0.7 else None)
    forward, backward = draw((2, layers + 1, layers + 1))
    forward[rng.random(forward.shape) < 0.1] = math.inf
    return TableTimes(forward, backward if rng.random() < 0.7 else None)


def random_problem(seed: int) -> Problem:
    """Any option on or off; even seeds use whole numbers, whose sums are exact and often equal."""
    rng = np.random.default_rng(seed)
    whole = seed % 2 == 0
    layers, devices = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    accounted, handled, shared = rng.random() < 0.6, rng.random() < 0.5, rng.random() < 0.4
    links = {}
    for pair in itertools.product(range(devices), repeat=2):
        bandwidths = 8.0 * 2.0 ** rng.integers(-2, 3, 2) if whole else rng.uniform(4, 80, 2)
        latencies = (rng.integers(0, 3, 2) if whole else rng.uniform(0, 2, 2)) * (rng.random() < 0.5)
        links[pair] = Link(*map(float, [*bandwidths, *latencies]), rng.random() < 0.5)
    chain = [
        Device(
            f"d{index}",
            random_times(rng, layers, whole),
            float(rng.integers(5, 90)) if accounted and rng.random() < 0.6 else math.inf,
            int(rng.integers(1, 4)),
            int(rng.integers(1, 5)),
            Handling(*rng.integers(0, 3, (4, layers + 1)).astype(float).tolist()) if handled else None,
            *((8.0 * 2.0 ** rng.integers(0, 3, 2)).tolist() if shared else (math.inf, math.inf)),
        )
        for index in range(devices)
    ]
    return Problem(
        chain,
        rng.integers(0, 12, layers + 1).tolist(),
        rng.integers(0, 12, layers + 1).tolist(),
        lambda source, target: links[source, target],
        weight_bytes=rng.integers(0, 6, layers).tolist() if accounted else (),
        activation_bytes=rng.integers(0, 6, layers).tolist() if accounted and rng.random() < 0.7 else (),
        state_copies=float(rng.integers(0, 3)),
        loss_time=float(rng.integers(0, 3)),
        central_minimum=min(int(rng.integers(0, 3)), layers),
        may_leave_out=bool(rng.random() < 0.5),
        share=bool(devices > 1 and rng.random() < 0.3),
    )


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block: int) -> None:
    feasible = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if expected is None:
            with pytest.raises(PlanError, match="layer"):
                plan_partition(problem)
            continue
        feasible += 1
        plan = plan_partition(problem)
        chain = tuple(zip(plan.devices, plan.boundaries, strict=True))
        assert plan.period == pytest.approx(expected[0], rel=1e-12), seed
        assert evaluate(problem, chain)[0] == pytest.approx(expected[0], rel=1e-12), seed
        assert plan.link_bytes == evaluate(problem, chain)[1], seed
        assert max(load.seconds for load in (*plan.stages, *plan.links)) <= plan.period, seed
        if seed % 2 == 0:
            assert (plan.period, plan.link_bytes, tuple(zip(plan.boundaries, plan.devices, strict=True))) == expected
    assert feasible > 50


def test_left_out_reason_is_the_best_chain_with_the_device() -> None:
    seen = 0
    for seed in range(0, 600, 2):
        problem = random_problem(seed)
        if not problem.may_leave_out or brute_force(problem) is None:
            continue
        plan = plan_partition(problem)
        for out in plan.left_out:
            seen += 1
            including = [
                evaluate(problem, chain)[0]
                for chain in chains(problem)
                if out.device in [device for device, _ in chain]
            ]
            best = min(including, default=math.inf)
            assert out.name == problem.devices[out.device].name
            if best > plan.period and math.isfinite(best):
                assert out.reason == f"a batch would take {best:.4g} s with it, {plan.period:.4g} s without"
            elif math.isfinite(best):
                assert "no faster with it" in out.reason
            else:
                assert "can take no layer" in out.reason or "no partition that includes it" in out.reason
        assert {*plan.devices, *(out.device for out in plan.left_out)} == set(range(len(problem.devices)))
    assert seen > 50


def uniform(devices: int, layers: int, **options: object) -> Problem:
    """Equal layers of 1 s forward and 2 s backward, nothing on the links."""
    times = AdditiveTimes([1.0] * layers, [2.0] * layers)
    chain = [Device(f"pi-{index}", times) for index in range(devices)]
    nothing = [0] * (layers + 1)
    return Problem(**{"devices": chain, "forward_bytes": nothing, "backward_bytes": nothing, **options})


def test_fields_of_a_plan() -> None:
    crossing = [0, 100, 100, 100, 10]
    plan = plan_partition(
        uniform(2, 4, forward_bytes=crossing, backward_bytes=crossing, link=lambda a, b: Link(1e3, 1e3))
    )
    assert plan.boundaries == (0, 2)
    assert [(stage.first, stage.stop, stage.seconds) for stage in plan.stages] == [(0, 2, 6.0), (2, 4, 6.0)]
    (link,) = plan.links
    assert (link.source, link.target, link.forward_bytes, link.backward_bytes) == ("pi-0", "pi-1", 110, 110)
    assert link.seconds == pytest.approx(0.88)
    assert (plan.period, plan.bottleneck) == (6.0, "stage 0 (pi-0)")
    assert (plan.single, plan.speedup) == ("pi-0", 2.0)


def test_the_last_hop_home_counts() -> None:
    crossing = [0, 0, 0, 1000]
    slow = plan_partition(
        uniform(3, 3, forward_bytes=crossing, backward_bytes=crossing, link=lambda a, b: Link(1e3, 1e3))
    )
    assert slow.bottleneck == "link pi-2 -> pi-0"
    assert slow.period == pytest.approx(8.0)


def test_half_duplex_is_the_sum() -> None:
    options = {"forward_bytes": [0, 1000, 0], "backward_bytes": [0, 500, 0]}
    full = plan_partition(uniform(2, 2, link=lambda a, b: Link(1e3, 1e3), **options))
    half = plan_partition(uniform(2, 2, link=lambda a, b: Link(1e3, 1e3, full_duplex=False), **options))
    assert (full.period, half.period) == (8.0, 12.0)


def test_a_slow_device_is_left_out_with_a_reason() -> None:
    problem = uniform(3, 6, may_leave_out=True)
    slow = Device("snail", AdditiveTimes([10.0] * 6, [20.0] * 6))
    plan = plan_partition(Problem([problem.devices[0], slow, problem.devices[2]], [0] * 7, [0] * 7, may_leave_out=True))
    assert plan.devices == (0, 2)
    assert [(out.name, out.reason) for out in plan.left_out] == [
        ("snail", "a batch would take 30 s with it, 9 s without")
    ]


def test_all_workers_may_be_left_out() -> None:
    plan = plan_partition(
        uniform(
            2, 2, forward_bytes=[9, 9, 9], backward_bytes=[9, 9, 9], link=lambda a, b: Link(1, 1), may_leave_out=True
        )
    )
    assert (plan.boundaries, plan.links, plan.period, plan.speedup) == ((0,), (), 6.0, 1.0)


def test_memory_moves_the_cut() -> None:
    small = Device("small", AdditiveTimes([1.0] * 4), memory=250, weight_versions=2, in_flight=3)
    large = Device("large", AdditiveTimes([1.0] * 4))
    plan = plan_partition(
        Problem([small, large], [0] * 5, [0] * 5, weight_bytes=[10] * 4, activation_bytes=[50] * 4, state_copies=2)
    )
    assert plan.boundaries == (0, 1)
    assert [stage.memory for stage in plan.stages] == [10 * 4 + 50 * 3, 3 * (10 * 3 + 50)]
    assert plan.single == "large"


def test_without_a_device_for_the_whole_there_is_no_speedup() -> None:
    device = Device("d", AdditiveTimes([1.0] * 2), memory=10)
    plan = plan_partition(Problem([device, device], [0] * 3, [0] * 3, weight_bytes=[10, 10]))
    assert (plan.single, plan.speedup) == (None, None)


@pytest.mark.parametrize(
    ("memories", "weights", "leave_out", "message"),
    [
        ((10, 100), (20, 5), False, r"pi-0 must hold the first layer, which need.* 20 bytes.*limit is 10 bytes"),
        ((100, 10), (20, 50), False, r"pi-1 has a memory limit of 10 bytes, but its smallest layer needs 20 bytes"),
        ((30, 30), (20, 50), True, r"at most the first layer of 2 find.* pi-0 30 bytes, pi-1 30 bytes"),
        ((math.inf, 30), (20, 50), False, r"pi-0 without limit, pi-1 30 bytes"),
    ],
)
def test_an_impossible_plan_names_device_and_memory(
    memories: tuple[float, ...], weights: tuple[int, ...], leave_out: bool, message: str
) -> None:
    times = AdditiveTimes([1.0, 1.0])
    chain = [Device(f"pi-{index}", times, memory) for index, memory in enumerate(memories)]
    with pytest.raises(PlanError, match=message):
        plan_partition(Problem(chain, [0] * 3, [0] * 3, weight_bytes=weights, may_leave_out=leave_out))


def test_too_few_layers() -> None:
    with pytest.raises(PlanError, match=r"2 layers cannot fill 3 devices \(pi-0, pi-1, pi-2\)"):
        plan_partition(uniform(3, 2))


def test_the_same_question_gets_the_same_answer() -> None:
    problem = random_problem(8)
    assert plan_partition(problem) == plan_partition(problem)


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_thousand_layers_on_64_devices(leave_out: bool) -> None:
    """The size that must be solved in seconds; pytest's own time limit guards it."""
    rng = np.random.default_rng(0)
    chain = [Device(f"d{index}", AdditiveTimes(rng.random(1000), rng.random(1000)), 1e9) for index in range(64)]
    crossing = rng.integers(1, 1000, 1001).tolist()
    problem = Problem(chain, crossing, crossing, lambda a, b: Link(1e6, 1e6), [1000] * 1000, may_leave_out=leave_out)
    plan = plan_partition(problem)
    assert plan.boundaries[0] == 0
    assert sum(stage.stop - stage.first for stage in plan.stages) == 1000
    assert plan.period == max(load.seconds for load in (*plan.stages, *plan.links))


@pytest.mark.parametrize(
    ("flops", "stages", "expected"),
    [
        ([1], 1, [0]),
        ([1, 1, 1, 1], 2, [0, 2]),
        ([5, 1, 1, 1, 5], 3, [0, 1, 4]),
        ([0, 0, 0], 3, [0, 1, 2]),
        ([1, 1, 1, 9], 2, [0, 3]),
        ([1.0] * 10, 4, [0, 1, 4, 7]),
    ],
)
def test_balanced(flops: list[float], stages: int, expected: list[int]) -> None:
    assert balanced(flops, stages) == expected


def test_balanced_equals_brute_force() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        flops = rng.integers(0, 9, rng.integers(1, 9)).tolist()
        stages = int(rng.integers(1, len(flops) + 1))

        def worst(cuts: tuple[int, ...], flops: list[int] = flops) -> int:
            edges = [0, *cuts, len(flops)]
            return max(sum(flops[first:stop]) for first, stop in itertools.pairwise(edges))

        best = min(itertools.combinations(range(1, len(flops)), stages - 1), key=lambda cuts: (worst(cuts), cuts))
        assert balanced(flops, stages) == [0, *best]


@pytest.mark.parametrize(
    ("flops", "stages", "message"), [([1, 1], 3, "2 layers cannot fill 3 stages"), ([1], 0, "at least 1, not 0")]
)
def test_balanced_refuses(flops: list[float], stages: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        balanced(flops, stages)
