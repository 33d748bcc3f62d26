"""The order in which a stage works: strict 1F1B, fixed by the schedule and never by arrival."""

from __future__ import annotations

from collections import deque
from typing import Literal

Action = tuple[Literal["forward", "backward"], int]


class OneForwardOneBackward:
    """Which job a stage does next.

    A stage runs ``window`` forwards first, then strictly one backward, one forward, and so on. A *flush* at job ``n``
    says that the central node waits for all backwards below ``n`` before it needs the forward of ``n``: from there the
    stage does backwards only, and after the last of them begins anew (design: FTPipeHD's 1F1B with a drain).

    Args:
        window: Forwards that may be outstanding, in jobs; at least 1.
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a stage needs a window of at least 1 job, not {window}")
        self.window = window
        self.forwards = 0
        """Number of forwards done, which is also the number of the next one."""
        self.backwards = 0
        """Number of backwards done, which is also the number of the next one."""
        self._flushes: deque[int] = deque()

    def flush(self, job: int) -> None:
        """Announce a flush at ``job``: no forward of that number is needed until all before it are backwarded."""
        if job < self.backwards or (self._flushes and job < self._flushes[-1]):
            raise ValueError(f"flush at job {job} comes too late")
        if not self._flushes or self._flushes[-1] != job:
            self._flushes.append(job)
        self._settle()

    def next(self) -> Action:
        """The one action that comes next, whether or not its input has arrived.

        Where the answer is a forward, a flush that arrives for the same job changes it to a backward.
        """
        flushed = bool(self._flushes) and self._flushes[0] == self.forwards
        if self.forwards - self.backwards < self.window and not flushed:
            return ("forward", self.forwards)
        return ("backward", self.backwards)

    def done(self, action: Action) -> None:
        """Record that ``action``, which must be :meth:`next`'s answer, is done."""
        if action != self.next():
            raise ValueError(f"{action} is out of order; next is {self.next()}")
        if action[0] == "forward":
            self.forwards += 1
        else:
            self.backwards += 1
            self._settle()

    def _settle(self) -> None:
        while self._flushes and self._flushes[0] == self.backwards:
            self._flushes.popleft()
