"""Shares of the processor, and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edge import EdgeError, Host, Testbed
from edge.cpu import CpuGroup

BUSY = """
import time
start = time.perf_counter()
while (elapsed := time.perf_counter() - start) < 1:
    pass
print(time.process_time() / elapsed)
"""


def test_both_interfaces_of_control_groups_are_written(tmp_path: Path) -> None:
    new, old = CpuGroup(tmp_path, 2), CpuGroup(tmp_path, 1)
    new.limit(33)
    assert (tmp_path / "cpu.max").read_text() == "6600 20000"
    new.limit(None)
    assert (tmp_path / "cpu.max").read_text() == "max 20000"
    old.limit(150)
    assert (tmp_path / "cpu.cfs_period_us").read_text() == "20000"
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == "30000"
    old.limit(None)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == "-1"


@pytest.fixture(scope="module")
def testbed(root: None) -> Iterator[Testbed]:
    with Testbed([Host("central"), Host("pi-1", cpu=10, memory="200MiB")]) as testbed:
        yield testbed


def test_a_busy_loop_gets_its_share(
    testbed: Testbed, twice: Callable[[Callable[[], float], float, float], None]
) -> None:
    def share() -> float:
        return float(testbed.run("pi-1", [sys.executable, "-S", "-c", BUSY], timeout=60).stdout)

    twice(share, 0.07, 0.15)
    testbed.set_cpu("pi-1", 20)
    twice(share, 0.14, 0.28)


def test_a_worker_can_tell_its_share(testbed: Testbed) -> None:
    testbed.set_cpu("pi-1", 40)
    script = "from lightning_accept.remote.cores import cpu_share; print(cpu_share())"
    assert float(testbed.run("pi-1", [sys.executable, "-c", script], timeout=120).stdout) == 0.4


def test_memory_is_limited(testbed: Testbed) -> None:
    small, large = ([sys.executable, "-S", "-c", f"bytearray({size})"] for size in (10**8, 10**9))
    testbed.run("pi-1", small, timeout=60)
    testbed.run("central", large, timeout=60)
    with pytest.raises(EdgeError, match=r"pi-1 failed with exit status 1(?s:.*)MemoryError"):
        testbed.run("pi-1", large, timeout=60)


def test_a_share_below_the_kernels_least_is_refused(testbed: Testbed) -> None:
    with pytest.raises(EdgeError, match="pi-1: a CPU share is at least 5 percent"):
        testbed.set_cpu("pi-1", 1)
