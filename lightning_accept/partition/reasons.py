"""Why a device was left out, and why there is no plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_accept.partition.costs import SecondsCosts
from lightning_accept.partition.plan import LeftOut, PlanError
from lightning_accept.partition.problem import Problem
from lightning_accept.partition.search import Suffixes, may_end, successors
from lightning_accept.partition.times import Floats


def left_out(problem: Problem, costs: SecondsCosts, found: Suffixes, used: set[int], period: float) -> list[LeftOut]:
    """For each device without a stage, the best period of a chain that includes it."""
    missing = [device for device in range(1, len(problem.devices)) if device not in used]
    if not missing:
        return []
    including = _including(problem, costs, found)
    answer = []
    for device in missing:
        seconds = including[device]
        if seconds > period:
            reason = f"{_with(problem, device, seconds)}, {period:.4g} s without"
        else:
            reason = f"no faster with it: {period:.4g} s per batch either way"
        answer.append(LeftOut(device, problem.devices[device].name, reason))
    return answer


def _with(problem: Problem, device: int, seconds: float) -> str:
    if np.isfinite(seconds):
        return f"a batch would take {seconds:.4g} s with it"
    smallest = _smallest(problem, device)
    limit = problem.devices[device].memory
    if smallest > limit:
        return f"it has {_size(limit)} but its smallest layer needs {_size(smallest)}: it can take no layer"
    return "no partition that includes it is possible"


def _including(problem: Problem, costs: SecondsCosts, found: Suffixes) -> dict[int, float]:
    """Least period of the chains that include each worker: the chain up to its end joined to what follows."""
    central = costs.central()
    until: dict[int, Floats] = {}
    answer = {}
    for device in range(1, len(problem.devices)):
        stage = costs.stage(device)
        several = np.full(problem.layers + 1, np.inf)
        for before in range(1, device):
            np.minimum(several, np.maximum(until[before], costs.link(before, device)), out=several)
        alone = np.maximum(central, costs.both(device))
        ends = np.maximum(several, costs.home(device))
        closing = np.maximum(np.minimum(alone, ends), stage[:, -1]).min() if may_end(problem, device) else np.inf
        reach = np.minimum(several, np.maximum(central, costs.link(0, device)))
        until[device] = np.maximum(stage, reach[:, None], out=stage).min(axis=0)
        passing = np.maximum(until[device], found.ahead[device]).min()
        answer[device] = float(min(closing, passing))
    return answer


def no_plan(problem: Problem) -> PlanError:
    """The error that names the device or limit in the way."""
    names = [device.name for device in problem.devices]
    needed = problem.central_minimum + len(names) - 1
    if not problem.may_leave_out and problem.layers < needed:
        return PlanError(
            f"{problem.layers} layers cannot fill {len(names)} devices ({', '.join(names)}), at least {needed} are "
            "needed: use fewer workers, or allow devices to be left out"
        )
    if message := _central(problem) or _workers(problem):
        return PlanError(message)
    return PlanError(_together(problem))


def _central(problem: Problem) -> str | None:
    device = problem.devices[0]
    prefix = problem.memory_prefix(0)
    need = float(prefix[problem.central_minimum])
    if need > device.memory:
        return (
            f"{device.name} must hold the first {_layers(problem.central_minimum)}, which need {_size(need)} of "
            f"memory, but its limit is {_size(device.memory)}: use fewer batches in flight or a smaller batch"
        )
    return None


def _workers(problem: Problem) -> str | None:
    if problem.may_leave_out:
        return None
    for index, device in enumerate(problem.devices):
        smallest = _smallest(problem, index)
        if index and smallest > device.memory:
            return (
                f"{device.name} has a memory limit of {_size(device.memory)}, but its smallest layer needs "
                f"{_size(smallest)}: use fewer batches in flight, or allow devices to be left out"
            )
    return None


def _together(problem: Problem) -> str:
    """How far the devices get, whatever time they take."""
    furthest = _furthest(problem)
    limits = ", ".join(
        f"{device.name} {_size(device.memory)}" if np.isfinite(device.memory) else f"{device.name} without limit"
        for device in problem.devices
    )
    need = _size(float(problem.memory_prefix(0)[-1]))
    if furthest < problem.layers:
        what = f"at most the first {_layers(furthest)} of {problem.layers} find a place"
    else:
        what = "the layers can only be placed with a device left empty or unable to run its share"
    return (
        f"the devices together cannot hold the model: {what}. Memory limits: {limits}; the whole model needs {need} at "
        f"{problem.devices[0].name}'s versions and batches in flight. Add a device, raise a limit, or use fewer "
        "batches in flight or a smaller batch"
    )


def _furthest(problem: Problem) -> int:
    costs = SecondsCosts(problem)
    reached: dict[int, NDArray[np.bool_]] = {0: np.asarray(np.isfinite(costs.central()))}
    for device in range(1, len(problem.devices)):
        before = np.zeros(problem.layers + 1, dtype=np.bool_)
        for source, cuts in reached.items():
            if device in successors(problem, source):
                before |= cuts
        possible = np.isfinite(costs.stage(device)) & before[:, None]
        reached[device] = np.logical_or.reduce(possible, axis=0)
    return max((int(np.flatnonzero(cuts)[-1]) for cuts in reached.values() if cuts.any()), default=0)


def _smallest(problem: Problem, device: int) -> float:
    return float(np.diff(problem.memory_prefix(device)).min())


def _layers(count: int) -> str:
    return "layer" if count == 1 else f"{count} layers"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
