"""Free links while nothing is measured: the central node asks for them, and who runs the testbed sees to it.

Moving weights over a link of 0.4 Mbit/s takes minutes and tells nothing that a training batch does not. So devices are
measured and weights moved over free links, while links are probed and batches trained over limited ones.
"""

from __future__ import annotations

import time
from pathlib import Path

FREE, LIMITED = "free", "limited"


class Pace:
    """Asks for free or limited links, and waits until it is so. They are free at first.

    Args:
        folder: Where the answers come as files; None not to ask at all.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._asked = 0
        self._links = FREE

    def ask(self, links: str) -> None:
        """Have the links ``free`` or ``limited``."""
        if self._folder is None or links == self._links:
            return
        self._links = links
        self._asked += 1
        print(f"links {self._asked} {links}", flush=True)
        answer = self._folder / str(self._asked)
        while not answer.exists():
            time.sleep(0.005)

    def end(self) -> None:
        """Nothing more will be asked for."""
        if self._folder is not None:
            print("links done", flush=True)
