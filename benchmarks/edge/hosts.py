"""What all testbeds do: commands on hosts, and workers started by the ordinary command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from lightning_accept.remote.tokens import TOKEN_VARIABLE
from lightning_accept.signals import raised_signals

from .command import Command
from .errors import EdgeError
from .host import Host, Rates
from .signals import held_signals

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_ANNOUNCED = r"^give this address to the central node: (\S+)$"
_Self = TypeVar("_Self", bound="Hosts")


class Hosts(ABC):
    """Several hosts, of which the first is the central node; a context manager.

    Args:
        hosts: Their names must differ.

    Raises:
        EdgeError: If the hosts cannot be emulated here.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        if not 1 <= len(hosts) <= 250:
            raise EdgeError(f"a testbed has between 1 and 250 hosts, not {len(hosts)}")
        self.hosts = {host.name: host for host in hosts}
        if len(self.hosts) < len(hosts):
            raise EdgeError(f"hosts need different names: {' '.join(host.name for host in hosts)}")
        self.central = hosts[0].name
        self._commands: list[Command] = []
        self._folder: Path | None = None
        self._signals = ExitStack()

    def __enter__(self: _Self) -> _Self:
        self._signals.enter_context(raised_signals())
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{self._claim()}."))
            self._build(self._folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all commands and remove everything. Idempotent."""
        with self._signals, held_signals(), ExitStack() as stack:
            if self._folder is not None:
                stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(self._tear_down)
            commands, self._commands, self._folder = self._commands, [], None
            self._before_end()
            for command in commands:
                command.ask_to_end()
            deadline = time.monotonic() + 5
            for command in commands:
                command.end(deadline - time.monotonic())

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        threads: int = 1,
    ) -> Command:
        """Start a command on a host.

        Args:
            name: The host.
            command: Program and arguments.
            env: Environment variables besides this process's.
            cwd: Its working folder.
            threads: Threads that numerical libraries are told to use.
        """
        if name not in self.hosts:
            raise EdgeError(f"there is no host {name!r}; there are {' '.join(self.hosts)}")
        if self._folder is None:
            raise EdgeError("the testbed is not up; use it as a context manager")
        environment = {**os.environ, **dict.fromkeys(_THREADS, str(threads)), **(env or {})}
        started = Command(name, [*self._prefix(name), *command], self._folder, environment, cwd)
        self._commands.append(started)
        return started

    def run(
        self,
        name: str,
        command: Sequence[str],
        timeout: float = 600.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        threads: int = 1,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; see :meth:`start` and :meth:`Command.wait`."""
        return self.start(name, command, env, cwd, threads).wait(timeout, check)

    def start_workers(
        self,
        token: str,
        threads: int = 1,
        names: Iterable[str] | None = None,
        arguments: Sequence[str] = (),
        timeout: float = 180.0,
    ) -> list[str]:
        """Start a worker on each host but the central node; returns their URLs in the order of the hosts.

        Args:
            token: The workers' bearer token.
            threads: Threads of each worker.
            names: Only on these hosts.
            arguments: More arguments of ``lightning-accept worker``.
            timeout: Seconds within which all must listen.

        Raises:
            EdgeError: If one does not; with what it printed.
        """
        chosen = list(self.hosts)[1:] if names is None else list(names)
        started = []
        for name in chosen:
            command = [sys.executable, "-m", "lightning_accept.cli", "worker", "--threads", str(threads)]
            place = ["--host", self._listen(name), "--port", "0"]
            started.append(self.start(name, [*command, *place, *arguments], {TOKEN_VARIABLE: token}, threads=threads))
        deadline = time.monotonic() + timeout
        found = [worker.wait_for(_ANNOUNCED, deadline - time.monotonic())[1] for worker in started]
        return [self._reach(name, url) for name, url in zip(chosen, found, strict=True)]

    @abstractmethod
    def set_rate(self, name: str, rates: Rates) -> None:
        """Change the rates of a host's link."""

    @abstractmethod
    def set_cpu(self, name: str, percent: float | None) -> None:
        """Change a host's share of the processor."""

    @abstractmethod
    def _claim(self) -> str:
        """A name for what is going to be made."""

    @abstractmethod
    def _build(self, folder: Path) -> None:
        """Make the hosts."""

    @abstractmethod
    def _before_end(self) -> None:
        """Make sure that commands can end at once."""

    @abstractmethod
    def _tear_down(self) -> None:
        """Remove what :meth:`_build` has made, whether all or a part of it."""

    @abstractmethod
    def _prefix(self, name: str) -> list[str]:
        """What a command is given to, so that it runs on the host."""

    @abstractmethod
    def _listen(self, name: str) -> str:
        """The address on which a worker of that host listens."""

    @abstractmethod
    def _reach(self, name: str, url: str) -> str:
        """The URL by which others reach a worker that announced ``url``."""
