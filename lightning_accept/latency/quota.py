"""A share of the CPU for this process, by the kernel's control groups (Linux, usually root only)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_LEAST = 0.001
"""Seconds: the shortest period and quota that the kernel takes."""


def unavailable() -> str | None:
    """Why the share of this process cannot be limited, or None if it can."""
    group = _controller()
    if group is None:
        return "there is no control group with the cpu controller under /sys/fs/cgroup"
    if not os.access(group, os.W_OK):
        return f"this user may not write to {group}"
    return None


@contextmanager
def limited(share: float, period: float) -> Iterator[None]:
    """Give this process ``share`` of one core, accounted every ``period`` seconds.

    Raises:
        OSError: If the kernel refuses.
    """
    controller = _controller()
    if controller is None:
        raise OSError("no control group with the cpu controller")
    period = max(period, _LEAST / min(1.0, share))
    quota, period_us = round(share * period * 1e6), round(period * 1e6)
    group = controller / f"lightning-accept-{os.getpid()}"
    group.mkdir()
    # A group competes with a weight of its own, whatever the niceness of the processes in it.
    weight = 1.25 ** -os.getpriority(os.PRIO_PROCESS, 0)
    try:
        if _is_v2(controller):
            (group / "cpu.weight").write_text(str(min(10_000, max(1, round(100 * weight)))))
            (group / "cpu.max").write_text(f"{quota} {period_us}")
        else:
            (group / "cpu.shares").write_text(str(round(1024 * weight)))
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (controller / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _controller() -> Path | None:
    for folder in (_ROOT / "cpu", _ROOT / "cpu,cpuacct"):
        if (folder / "cpu.cfs_quota_us").exists():
            return folder
    try:
        enabled = (_ROOT / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    return _ROOT if "cpu" in enabled else None


def _is_v2(controller: Path) -> bool:
    return controller == _ROOT
