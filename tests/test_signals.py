"""Signals that end a process become exceptions, and everything is as before afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lightning_accept.signals import ENDING, raised_signals


@pytest.mark.parametrize("number", ENDING)
def test_ending_signals_raise_within_and_not_after(number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as ended, raised_signals():
        os.kill(os.getpid(), number)
        threading.Event().wait(30)  # the handler runs before this thread goes on
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_somebody_else_s_handler_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with raised_signals():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_other_threads_leave_signals_alone() -> None:
    found: list[object] = []

    def look() -> None:
        with raised_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30)
    assert found == [signal.SIG_DFL]
