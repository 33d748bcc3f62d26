"""Signals that end a process, turned into exceptions so that cleaning up happens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What ends a process that does not handle it; not all systems have both."""


@contextmanager
def raised_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise SystemExit, unless somebody handles them; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
