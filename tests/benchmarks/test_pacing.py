"""The links are free while nothing is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import devices
import gates
import pacing
import pytest
from edge import Command, EdgeError

ASKS = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from pacing import Pace
pace = Pace(pathlib.Path(sys.argv[2]))
for links in sys.argv[3:]:
    pace.ask(links)
pace.end()
"""


def follow(folder: Path, *asked: str) -> list[bool]:
    """What was done with the links for a process that asks for these."""
    done: list[bool] = []
    (folder / "output").mkdir()
    (folder / "answers").mkdir()
    arguments = [sys.executable, "-S", "-c", ASKS, str(Path(pacing.__file__).parent), str(folder / "answers"), *asked]
    central = Command("central", arguments, folder / "output")
    try:
        devices.follow(central, folder / "answers", done.append, 60)
        central.wait(60)
    finally:
        central.end(0)
    return done


def test_what_is_asked_for_is_done_in_its_order(tmp_path: Path) -> None:
    assert follow(tmp_path, "limited", "free", "limited", "free") == [True, False, True, False]


def test_what_is_so_already_is_not_asked_for(tmp_path: Path) -> None:
    assert follow(tmp_path, "free", "limited", "limited", "free", "free") == [True, False]


def test_what_cannot_be_done_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match="central asks for links that are 'fast'"):
        follow(tmp_path, "fast")


def test_without_a_folder_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pace = pacing.Pace(None)
    pace.ask(pacing.LIMITED)
    pace.end()
    assert capsys.readouterr().out == ""


def test_actions_follow_calls() -> None:
    class Owner:
        def plan(self, number: int) -> int:
            return 2 * number

    owner, called = Owner(), []
    gates._after(owner, "plan", lambda: called.append("after"))
    assert owner.plan(4) == 8
    assert called == ["after"]
    del owner.plan
    assert owner.plan(5) == 10
    assert called == ["after"]
