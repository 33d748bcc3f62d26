"""What holds for all tests: one thread, one seed, no proxies, a scratch folder, and no process left behind."""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for the processes that tests start.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"
for _name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[_name]

import pytest  # noqa: E402
import torch  # noqa: E402

MARK = "LIGHTNING_ACCEPT_TESTS"
GRACE = 15.0
"""Seconds that processes started by the tests have to end once the last test is over."""


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts with one thread and the same random numbers, whichever ran before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _scratch_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs and checkpoints that a Trainer writes by default do not land in the repository."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("scratch"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fails if a process started by the tests, or by what they started, outlives them."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield
    left = _still_running(_marked(mark), time.monotonic() + GRACE)
    assert not left, f"processes outlived the tests: {left}"


def _marked(mark: str) -> dict[int, str]:
    """Process ids and command lines of all processes whose environment carries ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile, or belongs to someone else
    # Python's own helper lives as long as the interpreter that runs the tests.
    return {pid: line for pid, line in found.items() if pid != os.getpid() and "resource_tracker" not in line}


def _still_running(processes: dict[int, str], deadline: float) -> dict[int, str]:
    """Those of ``processes`` that have not ended at ``deadline``."""
    left = {}
    for pid, line in processes.items():
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
        if not ended:
            left[pid] = line
    return left
