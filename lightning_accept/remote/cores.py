"""How many cores this process may keep busy: its affinity, and what control groups leave of it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from lightning_accept.latency.cores import usable_cores

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cpu_share() -> float:
    """How many cores' worth of time this process may use: below :func:`usable_cores` under a CPU quota."""
    return min(float(usable_cores()), cgroup_quota())


def cgroup_quota(own: Path = _OWN, root: Path = _CGROUPS) -> float:
    """Cores' worth of time that this process's control groups (version 1 or 2) allow; infinity without a limit.

    Args:
        own: The file that names this process's groups.
        root: Where control groups are mounted.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return float("inf")
    least = float("inf")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            read, base = _version_2, root
        elif "cpu" in controllers.split(","):
            read, base = _version_1, root / "cpu"
        else:
            continue
        group = PurePosixPath(path)
        for part in (group, *group.parents):
            least = min(least, read(base / part.relative_to("/")))
    return least


def _version_1(folder: Path) -> float:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return float("inf")
    return quota / period if quota > 0 and period > 0 else float("inf")


def _version_2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # also "max"
        return float("inf")
