"""The best partition of a chain of layers over a chain of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_accept.partition.costs import BytesCosts, SecondsCosts
from lightning_accept.partition.plan import LeftOut, LinkLoad, Plan, PlanError, StageLoad
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.reasons import left_out, no_plan
from lightning_accept.partition.search import cheapest, starts, suffixes
from lightning_accept.partition.times import AdditiveTimes


def plan_partition(problem: Problem) -> Plan:
    """Find the partition with the shortest period.

    Exact, in O(devices * layers^2 + devices^2 * layers). Among partitions of equal period, the one with fewest bytes
    on the links; then the one whose cuts come earliest, then the earliest devices.

    Raises:
        PlanError: If no partition is possible; the message names the device or the limit.
    """
    costs = SecondsCosts(problem)
    found = suffixes(problem, costs, np.maximum)
    period = starts(problem, costs, np.maximum, found).least
    if not np.isfinite(period):
        raise no_plan(problem)
    chain = cheapest(problem, BytesCosts(problem, costs, period))
    used = {device for device, _ in chain}
    return _plan(problem, costs, chain, tuple(left_out(problem, costs, found, used, period)))


def fixed_partition(problem: Problem, boundaries: Sequence[int], devices: Sequence[int] | None = None) -> Plan:
    """What a given partition does.

    Args:
        problem: The problem.
        boundaries: First layer of every stage.
        devices: The devices that hold the stages, by index, in the order of the chain; all by default.

    Raises:
        PlanError: If a device cannot hold or run its share.
    """
    chain = list(enumerate(boundaries) if devices is None else zip(devices, boundaries, strict=True))
    plan = _plan(problem, SecondsCosts(problem), chain, ())
    for stage in plan.stages:
        if not np.isfinite(stage.seconds) or stage.memory > problem.devices[stage.device].memory:
            raise PlanError(
                f"{stage.name} cannot hold or run layers {stage.first} to {stage.stop - 1}, as the partition asks for;"
                " give it fewer layers, or use fewer batches in flight or a smaller batch"
            )
    return plan


def _plan(problem: Problem, costs: SecondsCosts, chain: list[tuple[int, int]], out: tuple[LeftOut, ...]) -> Plan:
    """The chain with what it does."""
    stages = _stages(problem, costs, chain)
    links = _links(problem, costs, chain)
    single, alone = _single(problem)
    period = max([max(stage.seconds, stage.network) for stage in stages] + [link.seconds for link in links])
    return Plan(
        stages=stages,
        links=links,
        period=period,
        bottleneck=_bottleneck(stages, links),
        single=single,
        speedup=None if single is None or period == 0 else alone / period,
        left_out=out,
    )


def balanced(flops: Sequence[float], stages: int) -> list[int]:
    """Cut the layers into runs such that the largest run has as few FLOPs as possible.

    Args:
        flops: FLOPs of every layer, not negative.
        stages: Number of runs, each of one layer at least.

    Returns:
        The first layer of every stage, beginning with 0. Among equally good partitions the one with the earliest
        cuts, so that the central node, which also computes the loss, gets the smallest share.

    Raises:
        PlanError: If there are fewer layers than stages.
    """
    if stages < 1:
        raise PlanError(f"the number of stages must be at least 1, not {stages}")
    if len(flops) < stages:
        raise PlanError(f"{len(flops)} layers cannot fill {stages} stages: use fewer workers, or cut finer layers")
    times = AdditiveTimes(flops)
    nothing = [0] * (len(flops) + 1)
    problem = Problem([Device(f"stage {stage}", times) for stage in range(stages)], nothing, nothing)
    return list(plan_partition(problem).boundaries)


def _stages(problem: Problem, costs: SecondsCosts, chain: list[tuple[int, int]]) -> tuple[StageLoad, ...]:
    stops = [first for _, first in chain[1:]] + [problem.layers]
    stages = []
    for (device, first), stop in zip(chain, stops, strict=True):
        chosen = problem.devices[device]
        if device:
            seconds, network = costs.compute(device, first)[stop], costs.network(device, first)[stop]
        else:
            seconds, network = costs.central_compute()[stop], costs.central_network()[stop]
        prefix = problem.memory_prefix(device)
        memory = float(prefix[stop] - prefix[first])
        stages.append(StageLoad(device, chosen.name, first, stop, float(seconds), memory, float(network)))
    return tuple(stages)


def _links(problem: Problem, costs: SecondsCosts, chain: list[tuple[int, int]]) -> tuple[LinkLoad, ...]:
    down, up = problem.crossing()
    names = [problem.devices[device].name for device, _ in chain]
    if len(chain) == 1:
        return ()
    if len(chain) == 2:
        worker, cut = chain[1]
        seconds = float(costs.both(worker)[cut])
        return (LinkLoad(names[0], names[1], float(down[cut] + up[-1]), float(up[cut] + down[-1]), seconds),)
    links = [
        LinkLoad(source, target, float(down[cut]), float(up[cut]), float(costs.link(before, device)[cut]))
        for source, target, (before, _), (device, cut) in zip(names, names[1:], chain, chain[1:], strict=False)
    ]
    links.append(LinkLoad(names[-1], names[0], float(down[-1]), float(up[-1]), costs.home(chain[-1][0])))
    return tuple(links)


def _single(problem: Problem) -> tuple[str | None, float]:
    """The fastest device that holds the whole model, which then keeps no versions, and its seconds per batch."""
    need = problem.memory_alone()
    able = [
        (float(device.times.row(0)[-1]) + problem.loss_time, index)
        for index, device in enumerate(problem.devices)
        if need <= device.memory and np.isfinite(device.times.row(0)[-1])
    ]
    if not able:
        return None, np.inf
    seconds, index = min(able)
    return problem.devices[index].name, seconds


def _bottleneck(stages: tuple[StageLoad, ...], links: tuple[LinkLoad, ...]) -> str:
    loads = [(stage.seconds, f"stage {index} ({stage.name})") for index, stage in enumerate(stages)]
    loads += [(stage.network, f"network of stage {index} ({stage.name})") for index, stage in enumerate(stages)]
    loads += [(link.seconds, f"link {link.source} -> {link.target}") for link in links]
    return max(loads, key=lambda load: load[0])[1]
