"""A central node and two workers on a testbed, that train under one setting after the other."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge import Command, EdgeError, Host, Testbed
from edge.host import Rates

from lightning_accept.remote.tokens import TOKEN_VARIABLE, new_token

CENTRAL_NODE = str(Path(__file__).with_name("central_node.py"))
NAMES = ("central", "pi-1", "pi-2")
DEADLINE = 900.0


@dataclass(frozen=True)
class Setting:
    """Links and CPU shares (percent) of the central node and the two workers; one-way delays in seconds."""

    rates: tuple[Rates, Rates, Rates]
    shares: tuple[int, int, int]
    delays: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def hosts(self) -> list[Host]:
        """The hosts of the testbed."""
        return [Host(*values) for values in zip(NAMES, self.rates, self.delays, self.shares, strict=True)]


class Devices:
    """A testbed with workers, whose links and shares change from one run to the next.

    Args:
        setting: The first setting; the delays stay.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.testbed = Testbed(setting.hosts())
        self._token = new_token()

    def __enter__(self) -> Devices:
        self.testbed.__enter__()
        try:
            self._urls = self.testbed.start_workers(self._token)
        except BaseException:
            self.testbed.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.testbed.close()

    def train(
        self,
        options: list[str],
        setting: Setting | None = None,
        after: int = 0,
        cut: tuple[str, int] | None = None,
        paced: bool = False,
        deadline: float = DEADLINE,
    ) -> dict[str, Any]:
        """Train once on all devices.

        Args:
            options: Of ``central_node.py``.
            setting: Rates and shares from now on.
            after: Batches after which ``cut`` happens.
            cut: A host, and its CPU share from then on.
            paced: Let the central node have free links while nothing is measured, see ``pacing.py``.
            deadline: Seconds that it may take.

        Returns:
            What ``central_node.py`` wrote.
        """
        if setting is not None:
            self.setting = setting
        for name, share in zip(NAMES, self.setting.shares, strict=True):
            self.testbed.set_cpu(name, share)
        self._set_links(not paced)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            command = [sys.executable, CENTRAL_NODE, "--workers", *self._urls, "--result", str(result), *options]
            if paced:
                command += ["--pace", folder]
            # Imports take no part in what is measured, so they need not be slow.
            self.testbed.set_cpu(NAMES[0], None)
            central = self.testbed.start(NAMES[0], command, {TOKEN_VARIABLE: self._token}, folder)
            central.wait_for("^ready$", deadline)
            self.testbed.set_cpu(NAMES[0], self.setting.shares[0])
            if cut is not None:
                central.wait_for(f"^batch {after}$", deadline)
                self.testbed.set_cpu(*cut)
            if paced:
                follow(central, Path(folder), self._set_links, deadline)
            central.wait(deadline)
            return dict(json.loads(result.read_text()))

    def _set_links(self, limited: bool) -> None:
        for name, rates in zip(NAMES, self.setting.rates, strict=True):
            self.testbed.set_rate(name, rates if limited else None)


def follow(central: Command, folder: Path, set_links: Callable[[bool], None], timeout: float) -> None:
    """Do as a paced central node asks, until it asks for nothing more.

    Args:
        central: The command that asks.
        folder: Where it looks for answers.
        set_links: Limits the links, or frees them.
        timeout: Seconds for all together.

    Raises:
        EdgeError: If it fails or takes too long.
    """
    deadline = time.monotonic() + timeout
    number = 1
    while True:
        asked = central.wait_for(rf"^links (?:{number} (\w+)|done)$", deadline - time.monotonic())[1]
        if asked is None:
            return
        if asked not in ("free", "limited"):
            raise EdgeError(f"{central.name} asks for links that are {asked!r}")
        set_links(asked == "limited")
        (folder / str(number)).touch()
        number += 1


def steady(times: list[float], in_flight: int) -> float:
    """Seconds per batch: the median over all runs of as many batches as are in flight.

    Single steps would not do: batches end in bursts where the schedule has more than one batch in its cycle.

    Args:
        times: When batches of the steady state ended, in seconds.
        in_flight: Batches in flight.
    """
    return statistics.median(spans(times, in_flight))


def spans(times: list[float], in_flight: int) -> list[float]:
    """Seconds per batch of every run of as many batches as are in flight; see :func:`steady`."""
    if len(times) < 3 * in_flight:
        raise ValueError(f"{len(times)} batches are too few to see a steady state with {in_flight} in flight")
    return [(later - earlier) / in_flight for earlier, later in zip(times, times[in_flight:], strict=False)]
