from __future__ import annotations

import sys
from pathlib import Path

import pytest
from edge import Command, EdgeError, Host, SlowLinks

FOREVER = "import signal; print('up', flush=True); signal.pause()"


def test_output_is_kept_apart(tmp_path: Path) -> None:
    script = "import sys; print('result'); print('trouble', file=sys.stderr); sys.exit(3)"
    done = Command("job", [sys.executable, "-S", "-c", script], tmp_path).wait(30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "result\n", "trouble\n")


def test_a_failure_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match=r"job failed with exit status 1(?s:.*)ZeroDivisionError"):
        Command("job", [sys.executable, "-S", "-c", "1 / 0"], tmp_path).wait(30)


def test_what_takes_too_long_is_killed(tmp_path: Path) -> None:
    command = Command("job", [sys.executable, "-S", "-c", FOREVER], tmp_path)
    command.wait_for("^up$", 30)
    with pytest.raises(EdgeError, match=r"job did not end within 0.01 s; it printed:\nup"):
        command.wait(0.01)
    assert not command.running


def test_an_end_without_the_expected_line_is_told(tmp_path: Path) -> None:
    command = Command("job", [sys.executable, "-S", "-c", "print('something else')"], tmp_path)
    with pytest.raises(EdgeError, match=r"job ended without printing '\^ready\$', but:\nsomething else"):
        command.wait_for("^ready$", 30)


def test_unknown_hosts_and_testbeds_that_are_down_are_named() -> None:
    links = SlowLinks([Host("central"), Host("pi-1")])
    with pytest.raises(EdgeError, match="there is no host 'pi-7'; there are central pi-1"):
        links.run("pi-7", ["true"])
    with pytest.raises(EdgeError, match="not up"):
        links.run("pi-1", ["true"])


def test_a_worker_that_does_not_start_is_quoted() -> None:
    with (
        SlowLinks([Host("central"), Host("pi-1")]) as links,
        pytest.raises(EdgeError, match=r"pi-1 ended(?s:.*)must hold one word"),
    ):
        links.start_workers("two words")
