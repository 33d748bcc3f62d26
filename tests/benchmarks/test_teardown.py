"""However a testbed ends, nothing of it is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from edge import Host, Testbed, cpu, leftovers, namespaces

pytestmark = pytest.mark.usefixtures("root")

FOREVER = [sys.executable, "-S", "-c", "import signal; print('up', flush=True); signal.pause()"]
OWNER = f"""
import signal, sys
from edge import Host, Testbed
with Testbed([Host("central"), Host("far", delay=0.01, cpu=5)]) as testbed:
    command = testbed.start("far", {FOREVER!r})
    command.wait_for("^up$", 30)
    print(testbed.tag, command.pid, flush=True)
    signal.pause()
"""


def tags() -> set[str]:
    return namespaces.tags(leftovers.PREFIX) | cpu.tags(leftovers.PREFIX)


def files(tag: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{tag}.*"))


def assert_ends(pidfd: int) -> None:
    ended, _, _ = select.select([pidfd], [], [], 20)
    os.close(pidfd)
    assert ended


def start_owner() -> tuple[subprocess.Popen[str], str, int]:
    """A process with a testbed: itself, the tag, and a descriptor of the process that runs on one of its hosts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    with owner.stdout:
        tag, pid = owner.stdout.readline().split()
    return owner, tag, os.pidfd_open(int(pid))


def test_after_an_exception_nothing_is_left() -> None:
    with pytest.raises(KeyError), Testbed([Host("central"), Host("far", delay=0.01, cpu=5)]) as testbed:
        tag = testbed.tag
        assert tag in tags()
        command = testbed.start("far", FOREVER)
        command.wait_for("^up$", 30)
        process = os.pidfd_open(command.pid)
        raise KeyError
    assert tag not in tags()
    assert not command.running
    assert not files(tag)
    assert_ends(process)


def test_an_unfinished_testbed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no cable")

    monkeypatch.setattr(namespaces, "packets_as_sent", fail)
    before = tags()
    with pytest.raises(OSError, match="no cable"), Testbed([Host("central")]):
        pytest.fail("it was not built")
    assert tags() <= before


def test_sigterm_removes_everything() -> None:
    owner, tag, process = start_owner()
    assert tag in tags()
    owner.terminate()
    assert owner.wait(60) == 128 + signal.SIGTERM
    assert tag not in tags()
    assert_ends(process)


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    owner, tag, process = start_owner()
    owner.kill()
    owner.wait(60)
    assert tag in tags()
    assert len(files(tag)) == 1
    with Testbed([Host("central")]):
        assert_ends(process)
        assert not namespaces.processes(tag)
    assert tag not in tags()
    assert not files(tag)


def test_two_testbeds_live_side_by_side() -> None:
    with Testbed([Host("central"), Host("pi-1")]) as first, Testbed([Host("central"), Host("pi-1")]) as second:
        assert first.tag != second.tag
        assert leftovers.remove_leftovers() == []
        assert {first.tag, second.tag} <= tags()


def test_nothing_connects_hosts_to_the_machines_own_network() -> None:
    with Testbed([Host("central"), Host("pi-1")]) as testbed:
        routes = testbed.run("pi-1", ["ip", "route"]).stdout.splitlines()
    assert len(routes) == 1
    assert routes[0].startswith("10.83.0.0/24 dev eth0")
