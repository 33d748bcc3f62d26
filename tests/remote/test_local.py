"""Embedded workers: up quickly, secret, and gone with their parent."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_accept.latency.cores import usable_cores
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.local import LocalWorkers

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits on process ids as only Linux can")


def ended(pid: int, seconds: float = 30.0) -> bool:
    """Whether the process ends within ``seconds``; for processes that are not our children."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@needs_pidfd
def test_workers_serve_with_a_share_of_the_cores_and_end_on_stop() -> None:
    workers = LocalWorkers(2, device="cpu")
    with workers:
        workers.start()
        assert len(set(workers.urls)) == 2
        assert workers.threads == max(1, usable_cores() // 3)
        pids = workers.pids
        for url in workers.urls:
            assert url.startswith("http://127.0.0.1:")
            handle = HttpWorker(url, workers.token, timeout=30.0)
            assert handle.claim("run-1", "me", "link")["threads"] == workers.threads
            handle.close()
            handle.release()
        for pid in pids:
            assert os.getsid(pid) == pid
            for secret_place in ("cmdline", "environ"):
                assert workers.token not in Path(f"/proc/{pid}/{secret_place}").read_text()
        with pytest.raises(PipelineError, match="token"):
            HttpWorker(workers.urls[0], "wrong", timeout=30.0).claim("run-1", "me", "link")
    assert all(ended(pid, 0.0) for pid in pids)
    workers.stop()
    assert workers.urls == workers.pids == []


PARENT = """
import json, sys
from lightning_accept.remote.local import LocalWorkers
workers = LocalWorkers(2, threads=1, device="cpu")
workers.start()
print(json.dumps(workers.pids), flush=True)
sys.stdin.read()
"""


@needs_pidfd
def test_workers_end_when_their_parent_is_killed() -> None:
    parent: Any = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        pids = json.loads(parent.stdout.readline())
        assert not any(ended(pid, 0.0) for pid in pids)
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        assert all(ended(pid) for pid in pids)
    finally:
        parent.kill()
        parent.communicate()


def test_a_worker_that_cannot_start_shows_what_it_printed() -> None:
    workers = LocalWorkers(2, device="cuda:99")
    with pytest.raises(
        PipelineError, match=r"ended before it listened; it printed:\n(.*\n)*.*'cuda:99' is not available"
    ):
        workers.start()
    assert workers.pids == []


def test_a_worker_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho some advice >&2\nread line\nread line\n")
    python.chmod(0o755)
    with pytest.raises(PipelineError, match="did not start in time"):
        LocalWorkers(1, python=str(python), timeout=0.2).start()


def test_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="workers=0: at least one"):
        LocalWorkers(0)
