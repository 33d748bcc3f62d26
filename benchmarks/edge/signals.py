"""Cleaning up that no signal cuts short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_accept.signals import ENDING


@contextmanager
def held_signals() -> Iterator[None]:
    """Within, signals that would end this process wait, so that cleaning up is not cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    # A blocked signal would be delivered to another thread, and its handler would run here all the same.
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGINT)}
    for each in before:
        signal.signal(each, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if waiting:
            signal.raise_signal(waiting[0])
