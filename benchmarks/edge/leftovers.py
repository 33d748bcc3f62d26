"""Whose testbed is whose: tags, and the removal of what a killed process left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from . import cpu, namespaces
from .errors import EdgeError

PREFIX = "accept-edge-"
_MOST = 100


class Tag:
    """The first tag that no living process has; free again when this process ends, however it does.

    Raises:
        EdgeError: If a hundred testbeds are up.
    """

    def __init__(self) -> None:
        for number in range(_MOST):
            holder = _hold(f"{PREFIX}{number}")
            if holder is not None:
                self.name = f"{PREFIX}{number}"
                self._holder = holder
                return
        raise EdgeError(f"{_MOST} testbeds are up already")

    def release(self) -> None:
        """Let another testbed have it. Idempotent."""
        self._holder.close()


def _hold(tag: str) -> socket.socket | None:
    """An address of the kernel's that exists once and dies with its process; None if somebody has it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0{tag}")
    except OSError:
        holder.close()
        return None
    return holder


def remove_leftovers() -> list[str]:
    """Remove every testbed whose process is gone; returns their tags."""
    removed = []
    for tag in sorted(namespaces.tags(PREFIX) | cpu.tags(PREFIX)):
        holder = _hold(tag)
        if holder is not None:
            with holder:
                remove(tag)
            removed.append(tag)
    return removed


def remove(tag: str) -> None:
    """End all processes of a testbed and remove its namespaces, control groups and files.

    Raises:
        EdgeError: If a process does not end.
    """
    cpu.unlimited(tag)
    deadline = time.monotonic() + 20
    while left := namespaces.processes(tag) | cpu.processes(tag):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise EdgeError(f"processes {sorted(left)} of the testbed {tag} do not end")
        time.sleep(0.02)
    namespaces.remove(tag)
    cpu.remove(tag)
    for folder in Path(tempfile.gettempdir()).glob(f"{tag}.*"):
        shutil.rmtree(folder, ignore_errors=True)
