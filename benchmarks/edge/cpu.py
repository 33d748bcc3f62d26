"""A share of the processor for all processes of a host, by a control group of version 1 or 2."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import EdgeError

PERIOD = 20_000
"""Microseconds over which a share holds. The kernel's default of 100 ms stalls a host for most of that time."""


@dataclass(frozen=True)
class CpuGroup:
    """One host's control group.

    Attributes:
        path: Its folder.
        version: Of the control groups' interface, 1 or 2.
    """

    path: Path
    version: int

    @classmethod
    def make(cls, tag: str, name: str) -> CpuGroup:
        """Create the group ``tag/name``.

        Raises:
            EdgeError: If this machine has no CPU controller that may be used.
        """
        root, version = hierarchy()
        group = cls(root / tag / name, version)
        try:
            if version == 2:
                (root / "cgroup.subtree_control").write_text("+cpu")
            group.path.parent.mkdir(exist_ok=True)
            if version == 2:
                (group.path.parent / "cgroup.subtree_control").write_text("+cpu")
            group.path.mkdir(exist_ok=True)
            group.limit(None)
        except OSError as error:
            raise EdgeError(
                f"control group {group.path} cannot be made: {error}; in a container, start it with the host's control"
                " groups writable"
            ) from error
        return group

    def limit(self, percent: float | None) -> None:
        """Give the group that share of one core; None for no limit."""
        quota = None if percent is None else round(PERIOD * percent / 100)
        if self.version == 2:
            (self.path / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD}")
        else:
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self.path / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def hierarchy() -> tuple[Path, int]:
    """Where CPU shares are set on this machine, and the interface's version.

    Raises:
        EdgeError: If there is no CPU controller.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, place, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(place), 1
    for _, place, kind, *_ in mounts:
        controllers = Path(place, "cgroup.controllers")
        if kind == "cgroup2" and controllers.exists() and "cpu" in controllers.read_text().split():
            return Path(place), 2
    raise EdgeError("no control groups with a CPU controller are mounted here; mount them, or use SlowLinks")


def tags(prefix: str) -> set[str]:
    """Tags of testbeds whose groups exist."""
    root, _ = hierarchy()
    return {path.name for path in root.glob(f"{prefix}*") if path.is_dir()}


def processes(tag: str) -> set[int]:
    """Ids of the processes in the groups of a testbed."""
    found: set[int] = set()
    for path in (hierarchy()[0] / tag).glob("*/cgroup.procs"):
        with suppress(OSError):
            found.update(int(line) for line in path.read_text().split())
    return found


def unlimited(tag: str) -> None:
    """Lift all limits of a testbed, so that its processes end at once."""
    root, version = hierarchy()
    for path in (root / tag).glob("*/"):
        with suppress(OSError):
            CpuGroup(path, version).limit(None)


def remove(tag: str) -> None:
    """Remove the empty groups of a testbed; the kernel may still be burying their last processes."""
    root = hierarchy()[0] / tag
    deadline = time.monotonic() + 10
    while root.exists():
        try:
            for path in [*root.glob("*/"), root]:
                os.rmdir(path)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
