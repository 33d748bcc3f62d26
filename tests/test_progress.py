"""The line that shows progress, on terminals that only take down what is written to them."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_accept.progress import SILENT, Activity, ProgressLine


class File(io.StringIO):
    """A file, or a pipe."""


def line_on(terminal: Any, **options: Any) -> ProgressLine:
    return ProgressLine(**{"stream": terminal, "delay": 0.0, "interval": 0.001, **options})


def test_what_is_done_and_how_far_it_is(new_terminal: Any) -> None:
    terminal = new_terminal()
    with line_on(terminal).show("deploying", 3) as shown:
        terminal.wait_for("deploying |")
        terminal.wait_for("  0 %")
        shown.advance(title="one is there")
        terminal.wait_for("one is there |")
        terminal.wait_for(" 33 %")
        shown.advance(2)
        terminal.wait_for("100 %")
    assert terminal.screen == [""]


def test_parts_one_after_the_other_never_go_backwards() -> None:
    activity = Activity("", 2)
    for title in ("first", "second"):
        activity.begin(title)
        for share in (0.5, 0.25, 1.0, 0.75):
            activity.update(share)
    assert activity.state == ("second", 2.0)
    activity.begin("third")
    activity.update(0.5)
    assert activity.state == ("third", 2.5)


def test_bytes(new_terminal: Any) -> None:
    terminal = new_terminal()
    with line_on(terminal).show("sending", 12_300_000, "B") as shown:
        shown.advance(4_100_000)
        terminal.wait_for("4.10MB of 12.3MB")


def test_more_than_all_and_nothing_at_all_are_shown_too(new_terminal: Any) -> None:
    terminal = new_terminal()
    with line_on(terminal).show("much", 2) as shown:
        shown.advance(3)
        terminal.wait_for("100 %")
    with line_on(terminal).show("nothing", 0, "B"):
        terminal.wait_for("nothing |")


def test_the_line_is_drawn_again_while_nothing_is_told(new_terminal: Any) -> None:
    terminal = new_terminal()
    with line_on(terminal).show("gathering", 1):
        terminal.wait_for("gathering |", count=4)
    assert re.search(r"\[00:\d\d<", terminal.getvalue())


def test_what_is_over_at_once_is_not_shown(new_terminal: Any) -> None:
    terminal = new_terminal()
    with line_on(terminal, delay=600.0).show("short", 1) as shown:
        shown.update(1.0)
    assert terminal.getvalue() == ""


def test_nothing_is_written_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    for stream in (File(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressLine(delay=0.0, interval=0.001).show("gathering", 2) as shown:
            assert set(threading.enumerate()) == before
            shown.begin("stage 1")
            shown.update(1.0)
        assert stream is None or stream.getvalue() == ""


def test_nothing_is_written_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> None:
    terminal = new_terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    before = set(threading.enumerate())
    for line in (SILENT, ProgressLine(enabled=False, delay=0.0)):
        with line.show("gathering", 2) as shown:
            assert set(threading.enumerate()) == before
            shown.advance()
    assert terminal.getvalue() == ""


def test_standard_error_is_where_it_is_by_default(monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> None:
    terminal = new_terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressLine(delay=0.0).show("here", 1):
        terminal.wait_for("here |")


def test_a_stand_in_for_standard_error_is_seen_through(monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> None:
    """As long as a rich display runs, standard error is a file that is no terminal and wants whole lines."""
    terminal, proxy = new_terminal(), File()
    proxy.rich_proxied_file = terminal  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", proxy)
    with ProgressLine(delay=0.0).show("here", 1):
        terminal.wait_for("here |")
    assert proxy.getvalue() == ""


@pytest.mark.parametrize("on_terminal", [True, False])
def test_lines_are_said_in_any_case(on_terminal: bool, monkeypatch: pytest.MonkeyPatch, new_terminal: Any) -> None:
    errors = new_terminal() if on_terminal else File()
    monkeypatch.setattr(sys, "stderr", errors)
    with ProgressLine(delay=0.0, interval=0.001).show("profiling", 1) as shown:
        if on_terminal:
            errors.wait_for("profiling |")
        shown.say("no luck")
    assert "no luck\n" in errors.getvalue()
    if on_terminal:
        assert errors.screen == ["no luck", ""]


def test_room_is_made_only_while_something_is_shown(new_terminal: Any) -> None:
    terminal = new_terminal()
    events: list[str] = []

    @contextmanager
    def aside() -> Iterator[None]:
        events.append(f"in {terminal.getvalue()!r}")
        yield
        events.append(f"out {terminal.screen}")

    with line_on(terminal, aside=aside, delay=600.0).show("short", 1):
        pass
    assert events == []
    with line_on(terminal, aside=aside).show("long", 1):
        terminal.wait_for("long |")
    assert events == ["in ''", "out ['']"]


def test_the_line_is_gone_after_an_error_and_an_interrupt(new_terminal: Any) -> None:
    for error in (ValueError, KeyboardInterrupt):
        terminal = new_terminal()
        with pytest.raises(error), line_on(terminal).show("moving", 1):
            terminal.wait_for("moving |")
            raise error
        assert terminal.screen == [""]


def test_lightnings_bars_stay_as_they_are(new_terminal: Any) -> None:
    terminal = new_terminal()
    bars = [Tqdm(desc=name, total=4, position=place, file=terminal) for place, name in enumerate(("Epoch 0", "Valid"))]
    before = terminal.screen
    assert [line.split(":")[0] for line in before] == ["Epoch 0", "Valid"]
    with line_on(terminal).show("gathering", 2):
        terminal.wait_for("gathering |", count=3)
    assert terminal.screen == [*before, ""]
    for bar in reversed(bars):
        bar.close()


def test_titles_come_from_any_thread() -> None:
    activity = Activity("", 400)
    threads = [threading.Thread(target=lambda: [activity.advance() for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert activity.state == ("", 400.0)
