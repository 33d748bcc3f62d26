"""Becomes a command on a host: ``python launch.py NAMESPACE GROUP MEMORY COMMAND...`` (MEMORY in bytes, or ``-``).

A program of its own, since nothing but the new process itself can be limited before it begins.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

_CLONE_NEWNET = 0x40000000


def enter_namespace(name: str) -> None:
    """Take part in the network of a namespace that ``ip netns add`` has made, and leave all else as it is.

    ``ip netns exec`` would also hide the control groups, by which a worker knows its share of the processor.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)


def main() -> None:
    """Join the group, take the limit, and turn into the command; the process id stays."""
    namespace, group, memory, *command = sys.argv[1:]
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    enter_namespace(namespace)
    if memory != "-":
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
