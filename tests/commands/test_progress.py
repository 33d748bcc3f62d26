"""Progress bars."""

from __future__ import annotations

import io
import sys

import pytest

from lightning_accept.commands.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as shown:
        shown.begin("one")
        shown.update(0.5)
        shown.update(1.0)
    assert capsys.readouterr() == ("", "")


def test_lines_are_said_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1) as shown:
        shown.say("no luck")
    assert capsys.readouterr() == ("", "no luck\n")


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(2) as shown:
        shown.begin("one")
        shown.update(1.0)
        shown.begin("two")
        shown.update(0.5)
        shown.update(0.25)  # never backwards
        shown.update(1.0)
    assert "one" in terminal.getvalue()
    assert "100 %" in terminal.getvalue()
