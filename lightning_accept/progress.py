"""One line on standard error that says what takes time and how far it is; silent where that is not a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from tqdm import tqdm

_FORMS = {
    "": "{desc} |{bar}| {percentage:3.0f} % [{elapsed}<{remaining}]",
    "B": "{desc} |{bar}| {n_fmt}B of {total_fmt}B [{elapsed}<{remaining}]",
}


class Activity:
    """What is going on and how far it is; told from any thread.

    Either its parts come one after the other (:meth:`begin`, :meth:`update`), or several go on at once
    (:meth:`advance`).

    Args:
        title: What is being done.
        total: How much there is to do: a number of parts, or of bytes.
        unit: ``B`` for bytes, else nothing.
    """

    def __init__(self, title: str, total: float, unit: str = "") -> None:
        self._lock = threading.Lock()
        self._title = title
        self._done = 0.0
        self._begun = 0.0
        self.total = total
        self.unit = unit

    def begin(self, title: str) -> None:
        """The next part begins; what came before is done."""
        with self._lock:
            self._title, self._begun = title, self._done

    def update(self, share: float) -> None:
        """``share`` of the part, from 0 to 1, is done."""
        with self._lock:
            self._done = max(self._done, self._begun + share)

    def advance(self, amount: float = 1.0, title: str | None = None) -> None:
        """So much more is done; from now on it is called ``title``, if that is given."""
        with self._lock:
            self._done += amount
            self._title = self._title if title is None else title

    def say(self, text: str) -> None:
        """A line above, on a terminal or not."""
        tqdm.write(text, file=sys.stderr)

    @property
    def state(self) -> tuple[str, float]:
        """What is being done, and how much of it is."""
        with self._lock:
            return self._title, self._done


class ProgressLine:
    """Shows one activity after the other, each on one line that is gone when it is over.

    A thread of its own draws the line, again and again, so that the time goes on while nothing else happens. What is
    over sooner than after ``delay`` is not shown.

    Args:
        enabled: Whether anything is shown at all.
        stream: Where; by default standard error. Nothing is shown on what is no terminal.
        delay: Seconds before which nothing is shown.
        interval: Seconds between two drawings.
        aside: Entered before the line is first drawn and left when it is gone: makes room on the terminal.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        delay: float = 0.5,
        interval: float = 0.25,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._enabled = enabled
        self._stream = stream
        self._delay = delay
        self._interval = interval
        self._aside = aside

    @contextmanager
    def show(self, title: str, total: float, unit: str = "") -> Iterator[Activity]:
        """Show an activity; see :class:`Activity` for the arguments."""
        activity = Activity(title, total, unit)
        # A rich display takes the place of standard error, and passes on whole lines only.
        stream = self._stream or getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        if not self._enabled or not _is_terminal(stream):
            yield activity
            return
        over = threading.Event()
        drawing = threading.Thread(target=self._draw, args=(activity, stream, over), name="progress line", daemon=True)
        drawing.start()
        try:
            yield activity
        finally:
            over.set()
            drawing.join()

    def _draw(self, activity: Activity, stream: TextIO, over: threading.Event) -> None:
        if over.wait(self._delay):
            return
        title, _ = activity.state
        with (
            self._aside(),
            _Bar(
                desc=title,
                total=activity.total or 1.0,
                file=stream,
                unit_scale=bool(activity.unit),
                bar_format=_FORMS[activity.unit],
                leave=False,
                dynamic_ncols=True,
                smoothing=0,
            ) as bar,
        ):
            while not over.wait(self._interval):
                title, done = activity.state
                bar.n = min(done, bar.total)
                bar.set_description_str(title)


SILENT = ProgressLine(enabled=False)
"""Shows nothing."""


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and hasattr(stream, "isatty") and stream.isatty()


class _Bar(tqdm):  # type: ignore[misc]
    """tqdm knows the lines of all its bars, Lightning's among them, and puts this one below."""

    monitor_interval = 0  # no thread that outlives the bar
