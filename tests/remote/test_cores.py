"""CPU quotas of control groups, read from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_accept.latency.cores import usable_cores
from lightning_accept.remote.cores import cgroup_quota, cpu_share


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "own", "3:cpuset:/\n2:cpu,cpuacct:/edge/1\n1:name=systemd:/\n")
    write(tmp_path / "cpu" / "edge" / "1" / "cpu.cfs_quota_us", "10000\n")
    write(tmp_path / "cpu" / "edge" / "1" / "cpu.cfs_period_us", "20000\n")
    assert cgroup_quota(tmp_path / "own", tmp_path) == 0.5


def test_version_2_takes_the_tightest_of_the_groups_above(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/a/b\n")
    write(tmp_path / "a" / "b" / "cpu.max", "max 100000\n")
    write(tmp_path / "a" / "cpu.max", "150000 100000\n")
    assert cgroup_quota(tmp_path / "own", tmp_path) == 1.5


@pytest.mark.parametrize("quota", ["-1", "nonsense"])
def test_no_limit(tmp_path: Path, quota: str) -> None:
    write(tmp_path / "own", "2:cpu:/\n")
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", quota)
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000")
    assert cgroup_quota(tmp_path / "own", tmp_path) == float("inf")
    assert cgroup_quota(tmp_path / "missing", tmp_path) == float("inf")


def test_share_is_no_more_than_the_cores() -> None:
    assert 0 < cpu_share() <= usable_cores()
