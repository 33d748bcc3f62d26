"""Starting a method's processes on the hosts of a testbed, and reading what they print."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from devices import NAMES
from edge import Command, Testbed

from lightning_accept.remote.tokens import TOKEN_VARIABLE, new_token

from .job import DEVICE
from .variants import Variant

SETUP = 900.0
"""Seconds for imports, connecting, measuring, deploying and the batches that warm up."""

_FOLDER = Path(__file__).parents[1]


def begin(testbed: Testbed, variant: Variant, common: Sequence[str]) -> list[Command]:
    """Start a method's processes; the first is the one that tells of batches."""

    def start(rank: int, name: str, *more: str, method: str = variant.method, token: str = "") -> Command:
        place = ["--rank", str(rank), "--own", testbed.address(name), "--address", testbed.address(NAMES[0])]
        command = [sys.executable, "-m", "rivals", method, *common, *place, *variant.options, *more]
        return testbed.start(name, command, {TOKEN_VARIABLE: token}, _FOLDER)

    if variant.host is not None:
        return [start(0, variant.host)]
    if variant.method == "ours":
        token = new_token()
        urls = testbed.start_workers(token, names=NAMES[1 : 1 + variant.workers])
        return [start(0, NAMES[0], "--workers", *urls, token=token)]
    if variant.method == "hivemind":
        first = start(0, NAMES[0])
        peer = first.wait_for(r"^peer (\S+)$", SETUP)[1]
        return [first, *(start(rank, name, "--peer", peer) for rank, name in enumerate(NAMES[1:], 1))]
    server = [start(0, NAMES[0], method="flower-server")] if variant.method == "flower" else []
    return [*server, *(start(rank, name) for rank, name in enumerate(NAMES))]


def follow(commands: Sequence[Command], done: Callable[[str], bool], seconds: float) -> str | None:
    """Wait until the first command's output is as wanted.

    Returns:
        None then, otherwise why it is not: a process has ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while True:
        over = time.monotonic() > deadline
        ended = [command for command in commands if not command.running]
        if done(commands[0].output()):
            return None
        if ended:
            return f"{ended[0].name} ended: {last_line(ended[0])}"
        if over:
            return f"stopped after {seconds:.0f} s"
        time.sleep(0.05)


def last_line(command: Command) -> str:
    """The end of what a process has written, errors first."""
    lines = [line for text in (command.output(), command.errors()) for line in text.splitlines()]
    said = [line.strip() for line in lines if re.search(r"\w{3}", line)]
    return said[-1][:300] if said else "it printed nothing"


def batch_times(output: str) -> list[float]:
    """When batches ended, in seconds."""
    return [float(found) for found in re.findall(r"^batch \d+ (\S+)$", output, re.MULTILINE)]


def accuracies(output: str) -> list[tuple[int, float]]:
    """Test accuracies after so many batches."""
    found = re.findall(r"^accuracy (\d+) (\S+)$", output, re.MULTILINE)
    return [(int(count), float(share)) for count, share in found]


def traffic(testbed: Testbed) -> int:
    """Bytes that all hosts have sent so far, framing included."""
    return sum(sent_bytes(testbed.run(name, ["cat", "/proc/net/dev"], timeout=60).stdout) for name in NAMES)


def sent_bytes(table: str) -> int:
    """What a host has sent, from its table of network devices."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(f"{DEVICE}:")]
    return int(line.split(":", 1)[1].split()[8])
