"""The line that shows progress while Lightning shows bars of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_accept.progress import SILENT, ProgressLine


def progress_line(trainer: Trainer) -> ProgressLine:
    """A line that gets along with the trainer's progress bar; a silent one if there is no bar, or it shows nothing."""
    bar = trainer.progress_bar_callback
    if bar is None or getattr(bar, "is_disabled", False):
        return SILENT
    return ProgressLine(aside=partial(_paused, bar))


@contextmanager
def _paused(bar: Any) -> Iterator[None]:
    """Take a rich bar off the terminal for a while.

    It draws itself anew all the time, over whatever else stands there. The lines of tqdm know of each other.
    """
    display = getattr(getattr(bar, "progress", None), "live", None)
    if display is None or not display.is_started:
        yield
        return
    transient, display.transient = display.transient, True  # what it has drawn is wiped out when it stops
    display.stop()
    try:
        yield
    finally:
        display.transient = transient
        display.start(refresh=True)
