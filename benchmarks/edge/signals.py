"""Signals that end a process, turned into exceptions so that cleaning up happens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raised_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise SystemExit, unless somebody handles them; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held_signals() -> Iterator[None]:
    """Within, signals that would end this process wait, so that cleaning up is not cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    # A blocked signal would be delivered to another thread, and its handler would run here all the same.
    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGINT)}
    for each in before:
        signal.signal(each, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if waiting:
            signal.raise_signal(waiting[0])


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
