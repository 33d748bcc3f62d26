"""Embedded workers: processes on this machine that end with the one that started them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from lightning_accept.latency.cores import usable_cores
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.remote.tokens import new_token

# Reads its configuration from standard input, since arguments and environment can be seen by every user. The path comes
# along, so that the package and the user's optimizers are found as they are here.
_BOOT = (
    "import sys; sys.path.pop(0); import json; config = json.loads(sys.stdin.buffer.readline());"
    " sys.path[:] = config.pop('path'); from lightning_accept.remote.embedded import main; sys.exit(main(config))"
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class LocalWorkers:
    """Starts ``count`` worker processes on free ports of the loopback interface; also a context manager.

    Args:
        count: Number of workers.
        threads: Threads per worker; by default this machine's cores are divided among the workers and this process.
        device: As the option ``--device`` of the daemon.
        lease: As the option ``--lease`` of the daemon.
        allow_optimizer: As the option ``--allow-optimizer`` of the daemon.
        python: The interpreter.
        timeout: Seconds within which the workers must be up.
    """

    def __init__(
        self,
        count: int,
        *,
        threads: int | None = None,
        device: str = "auto",
        lease: float = 60.0,
        allow_optimizer: Sequence[str] = (),
        python: str = sys.executable,
        timeout: float = 120.0,
    ) -> None:
        if count < 1:
            raise ValueError(f"workers={count}: at least one worker is needed")
        self.token = new_token()
        self.urls: list[str] = []
        self._count = count
        self.threads = threads or max(1, usable_cores() // (count + 1))
        self._config = {
            "token": self.token,
            "threads": self.threads,
            "device": device,
            "lease": lease,
            "allow_optimizer": list(allow_optimizer),
        }
        self._python = python
        self._timeout = timeout
        self._processes: list[_Process] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that were started."""
        return [process.popen.pid for process in self._processes]

    def start(self) -> None:
        """Start the workers and wait until all listen.

        Raises:
            PipelineError: If one ends or is silent for too long; the message holds what it printed.
        """
        if self._processes:
            return
        deadline = time.monotonic() + self._timeout
        try:
            for _ in range(self._count):
                self._processes.append(_Process(self._python, self._config))
            self.urls = [process.wait_for_url(deadline - time.monotonic()) for process in self._processes]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the workers, gently at first. Idempotent."""
        processes, self._processes, self.urls = self._processes, [], []
        for process in processes:
            process.let_go()
        deadline = time.monotonic() + 5.0
        for process in processes:
            process.end(deadline)

    def __enter__(self) -> LocalWorkers:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _Process:
    """One worker process."""

    def __init__(self, python: str, config: dict[str, Any]) -> None:
        threads = str(config["threads"])
        self._errors: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        # A session of its own keeps the terminal's Ctrl-C away: the central node decides what it means.
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self.popen = subprocess.Popen(
            [python, "-c", _BOOT, "lightning-accept-worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, threads)},
            start_new_session=True,
            creationflags=flags,
        )
        assert self.popen.stdin is not None
        line = json.dumps({**config, "path": [entry or os.getcwd() for entry in sys.path]}).encode() + b"\n"
        with suppress(BrokenPipeError):
            self.popen.stdin.write(line)
            self.popen.stdin.flush()

    def wait_for_url(self, timeout: float) -> str:
        """The URL that the worker announces within ``timeout`` seconds."""
        lines: list[bytes] = []

        def read() -> None:
            assert self.popen.stdout is not None
            lines.append(self.popen.stdout.readline())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(max(0.0, timeout))
        try:
            return str(json.loads(lines[0])["url"])
        except IndexError:
            problem = "did not start in time"
        except (ValueError, KeyError, TypeError):
            problem = "ended before it listened"
        raise PipelineError(f"an embedded worker {problem}; it printed:\n{self._tail()}")

    def _tail(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-30:]) or "(nothing)"

    def let_go(self) -> None:
        """Tell the worker to end."""
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for the worker's end until ``deadline``, then insist."""
        for insist in (self.popen.terminate, self.popen.kill):
            try:
                self.popen.wait(max(0.0, deadline - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                insist()
                deadline = time.monotonic() + 2.0
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._errors.close()
