"""A process of the testbed, with its output in files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .errors import EdgeError


class Command:
    """Starts ``arguments`` in a session of its own.

    Args:
        name: What names it in errors and files.
        arguments: Program and arguments.
        folder: Where its output goes.
        environment: All its environment variables; by default this process's.
        cwd: Its working folder.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        number = sum(1 for _ in folder.glob("*.out"))
        self._files = [folder / f"{number}-{name}.{kind}" for kind in ("out", "err")]
        with open(self._files[0], "wb") as output, open(self._files[1], "wb") as errors:
            self._process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def output(self) -> str:
        """What it has printed so far."""
        return self._files[0].read_text(errors="replace")

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._files[1].read_text(errors="replace")

    def tail(self, lines: int = 30) -> str:
        """The last lines of errors and output, for a message."""
        last = [line for text in (self.output(), self.errors()) for line in text.splitlines()[-lines:]]
        return "\n".join(last) or "(it printed nothing)"

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait until the output has what the regular expression ``pattern`` describes, ``^`` being a line's begin.

        Raises:
            EdgeError: If it ends or takes longer than ``timeout`` seconds; with the end of its output.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running
            found = re.search(pattern, self.output(), re.MULTILINE)
            if found:
                return found
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else f"ran for {timeout:g} s"
                raise EdgeError(f"{self.name} {what} without printing {pattern!r}, but:\n{self.tail()}")
            time.sleep(0.02)

    def wait(self, timeout: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Wait for its end.

        Args:
            timeout: Seconds; a command that takes longer is killed.
            check: Whether an exit status other than 0 is an error.

        Raises:
            EdgeError: If it takes too long or fails; with the end of its output.
        """
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end(0)
            raise EdgeError(f"{self.name} did not end within {timeout:g} s; it printed:\n{self.tail()}") from None
        if check and status:
            raise EdgeError(f"{self.name} failed with exit status {status}; it printed:\n{self.tail()}")
        return subprocess.CompletedProcess(self.arguments, status, self.output(), self.errors())

    def ask_to_end(self) -> None:
        """Send SIGTERM to it and what it started."""
        self._signal(signal.SIGTERM)

    def end(self, patience: float) -> None:
        """Kill it and what it started, unless it ends within ``patience`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, patience))
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
