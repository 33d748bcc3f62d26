"""The system's own programs, and what a testbed asks of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import EdgeError

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "ethtool": "ethtool"}
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def missing() -> str | None:
    """Why network namespaces cannot be made here; None if they can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only; SlowLinks emulates slow links without them"
    if os.geteuid() != 0:
        return "network namespaces need root; SlowLinks emulates slow links without it"
    absent = [tool for tool in _PACKAGES if shutil.which(tool, path=_PATH) is None]
    if absent:
        packages = " ".join(dict.fromkeys(_PACKAGES[tool] for tool in absent))
        return f"{', '.join(absent)} not found; on Debian: apt-get install {packages}"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun does not exist; load the kernel module tun, or pass the device on to the container"
    return None


def tool(*command: str) -> str:
    """Run one of the programs and return what it prints.

    Raises:
        EdgeError: With the command and its complaint.
    """
    program = shutil.which(command[0], path=_PATH)
    if program is None:
        raise EdgeError(missing() or f"{command[0]} not found")
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise EdgeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
