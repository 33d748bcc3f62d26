"""CPU shares by control groups, on made-up folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_accept.latency import quota


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The groups that were removed; the kernel's files cannot be deleted one by one, so neither are these."""
    gone: list[Path] = []
    monkeypatch.setattr(Path, "rmdir", lambda folder: gone.append(folder))
    return gone


def test_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: list[Path]) -> None:
    monkeypatch.setattr(quota, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "getpriority", lambda which, who: -10)
    controller = tmp_path / "cpu"
    controller.mkdir()
    (controller / "cpu.cfs_quota_us").touch()
    assert quota.unavailable() is None
    with quota.limited(0.5, 0.01):
        (group,) = controller.glob("lightning-accept-*")
        assert (group / "cpu.cfs_period_us").read_text() == "10000"
        assert (group / "cpu.cfs_quota_us").read_text() == "5000"
        assert (group / "cpu.shares").read_text() == str(round(1024 * 1.25**10))
        assert (group / "cgroup.procs").read_text() == str(os.getpid())
    assert (controller / "cgroup.procs").read_text() == str(os.getpid())
    assert removed == [group]


def test_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: list[Path]) -> None:
    monkeypatch.setattr(quota, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    with pytest.raises(ValueError, match="stop"), quota.limited(0.25, 0.001):
        (group,) = tmp_path.glob("lightning-accept-*")
        # The kernel takes no quota under a millisecond.
        assert (group / "cpu.max").read_text() == "1000 4000"
        assert (group / "cpu.weight").read_text() == "100"
        raise ValueError("stop")
    assert removed == [group]


def test_without_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "_ROOT", tmp_path)
    assert quota.unavailable() == "there is no control group with the cpu controller under /sys/fs/cgroup"
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    assert quota.unavailable() is not None
    with pytest.raises(OSError, match="no control group"), quota.limited(0.5, 0.01):
        pass


def test_without_the_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "_ROOT", tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not write" in (quota.unavailable() or "")
