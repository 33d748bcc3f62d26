"""Keeps the garbage collector from stopping a device in the middle of a batch.

A process that has imported torch holds some 200,000 objects that stay until its end. A full collection looks at each of
them, which took 0.2 s on a core that others use too: longer than a batch. Frozen objects are not looked at.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect what is garbage now, and freeze the rest, in a process that is all ours."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Freeze:
    """Freezes what there is in a process that belongs to somebody else, for a while.

    Where something is frozen already, that is left as it is.
    """

    def __init__(self) -> None:
        self._mine = False

    def begin(self) -> None:
        """Freeze; garbage that there is at this moment stays until :meth:`end`. Idempotent."""
        if not self._mine and gc.get_freeze_count() == 0:
            gc.freeze()
            self._mine = True

    def end(self) -> None:
        """Undo :meth:`begin`. Idempotent."""
        if self._mine:
            self._mine = False
            gc.unfreeze()
