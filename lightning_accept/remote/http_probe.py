"""Probing the link to a worker over HTTP."""

from __future__ import annotations

import time

from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.messages import TransportError
from lightning_accept.remote.interrupt import Interrupter
from lightning_accept.remote.packet_sender import run_path
from lightning_accept.remote.peer import Peer
from lightning_accept.remote.probe import filler, probe


def longest(seconds: float) -> float:
    """Seconds after which a link that was to be probed for ``seconds`` is given up."""
    return 4 * seconds + 30.0


def probe_there(peer: Peer, run: str, seconds: float) -> Speed:
    """The speed of the way to the worker.

    Args:
        peer: The worker, with its token or the run's link token.
        run: The run that holds it.
        seconds: What the measurement may take, about.

    Raises:
        PipelineError: If the worker refuses.
        TransportError: If it cannot be reached, or the link is too slow to be measured.
    """
    deadline = _Deadline(peer.url, seconds)

    def send(size: int) -> None:
        deadline.check()
        peer.request("POST", f"{run_path(run)}/probe", "a probe", body=filler(size))

    return probe(send, seconds)


def probe_back(peer: Peer, run: str, seconds: float) -> Speed:
    """The speed of the way from the worker; as :func:`probe_there`."""
    deadline = _Deadline(peer.url, seconds)

    def fetch(size: int) -> None:
        deadline.check()
        peer.request("GET", f"{run_path(run)}/probe", "a probe", query={"bytes": str(size)})

    return probe(fetch, seconds)


class LinkProbe:
    """Measures the way to a neighbouring worker; may be ended from another thread.

    Args:
        url: The neighbour's URL.
        link_token: The run's link token.
        timeout: Seconds after which a neighbour that cannot be reached is given up.
        cafile: Certificates against which the neighbour's is checked; None for the system's.
    """

    def __init__(self, url: str, link_token: str, *, timeout: float, cafile: str | None) -> None:
        self._interrupter = Interrupter()
        self._peer = Peer(url, link_token, timeout=timeout, cafile=cafile, interrupter=self._interrupter)

    def measure(self, run: str, seconds: float) -> Speed:
        """The speed, as :func:`probe_there`."""
        return probe_there(self._peer, run, seconds)

    def close(self) -> None:
        """End a measurement in progress."""
        self._interrupter.interrupt()
        self._peer.close()


class _Deadline:
    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._limit = longest(seconds)
        self._end = time.monotonic() + self._limit

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TransportError(
                f"the link to {self._url} is too slow to be measured within {self._limit:g} s; give its speed by hand"
                " or leave the worker out"
            )
