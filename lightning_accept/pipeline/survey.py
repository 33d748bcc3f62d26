"""Asks every device how fast it is, and every link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from lightning_accept.latency.profile import Profile, ProfileRequest, run_profile
from lightning_accept.pipeline.speeds import Speeds
from lightning_accept.pipeline.transport import WorkerHandle
from lightning_accept.progress import SILENT, ProgressLine

CENTRAL = "central node"
"""What the central node is called among the devices."""

Profiler: TypeAlias = Callable[[ProfileRequest, torch.device], Profile]

_PROFILE_TIMEOUT = 3600.0


def profile_devices(
    requests: Mapping[int, ProfileRequest],
    workers: Sequence[WorkerHandle],
    device: torch.device,
    profiler: Profiler = run_profile,
    on_done: Callable[[int], None] = lambda number: None,
) -> dict[int, Profile]:
    """Measure sub-models on several devices at the same time.

    Args:
        requests: What to measure, by device number; 0 is this process, worker i has number i + 1.
        workers: All workers.
        device: This process's device.
        profiler: Measures in this process.
        on_done: Told, from any thread, of every device that has been measured.

    Raises:
        PipelineError: If a worker cannot be asked.
    """

    def ask(number: int) -> Profile:
        if number == 0:
            profile = profiler(requests[0], device)
        else:
            profile = workers[number - 1].profile(requests[number], _PROFILE_TIMEOUT)
        on_done(number)
        return profile

    # This process measures in the calling thread, which computes with the threads that it will train with.
    others = [number for number in requests if number]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        pending = {number: pool.submit(ask, number) for number in others}
        found = {0: ask(0)} if 0 in requests else {}
        found.update({number: future.result() for number, future in pending.items()})
    return found


def measure_links(
    workers: Sequence[WorkerHandle], seconds: float, *, all_pairs: bool, progress: ProgressLine = SILENT
) -> Speeds:
    """Measure the links that a chain of these workers may use, each direction alone.

    One after the other: links that meet in a device share its way into the network.

    Args:
        workers: All workers, in the order of the chain.
        seconds: About how long one direction of one link may take.
        all_pairs: Also the links between workers that are not neighbours, for when some may be left out.
        progress: Shows which link it is.
    """
    speeds = Speeds()
    numbers = range(1, len(workers) + 1)
    ends = [number for number in numbers if all_pairs or number in (1, len(workers))]
    ways = [(a, b) for a in numbers for b in numbers if a != b and (all_pairs or abs(a - b) == 1)]
    with progress.show("measuring links", len(ends) + len(ways)) as shown:
        for number in ends:
            worker = workers[number - 1]
            shown.begin(f"measuring link to and from {worker.name}")
            speeds.known[0, number], speeds.known[number, 0] = worker.measure_link(seconds)
            shown.update(1.0)
        for source, target in ways:
            worker, other = workers[source - 1], workers[target - 1]
            shown.begin(f"measuring link {worker.name} -> {other.name}")
            speeds.known[source, target] = worker.measure_link_to(other.address, seconds)
            shown.update(1.0)
    return speeds
