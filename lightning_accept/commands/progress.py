"""A progress bar on standard error, silent where that is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


class Progress:
    """One bar over several tasks, each of which reports its own share.

    Args:
        bar: What shows it.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._share = 0.0

    def begin(self, title: str) -> None:
        """The next task begins."""
        self._share = 0.0
        self._bar.set_description_str(title)

    def update(self, share: float) -> None:
        """``share`` of the task, from 0 to 1, is done."""
        if share > self._share:
            self._bar.update(share - self._share)
            self._share = share

    def say(self, text: str) -> None:
        """A line above the bar, on a terminal or not."""
        self._bar.write(text, file=sys.stderr)


@contextmanager
def progress(tasks: int) -> Iterator[Progress]:
    """A bar over so many tasks."""
    form = "{desc} |{bar}| {percentage:3.0f} % [{elapsed}<{remaining}]"
    with tqdm(total=tasks, disable=None, bar_format=form) as bar:
        yield Progress(bar)
