"""A worker completes its deployment with the layers that other workers hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_accept.pipeline.handover import completed, nbytes
from lightning_accept.pipeline.messages import (
    Deployment,
    PipelineError,
    SourceUnreachable,
    StageFault,
    StageState,
    TransportError,
    WrongTerm,
)
from lightning_accept.remote.frames import WireError, load_json
from lightning_accept.remote.interrupt import Interrupter
from lightning_accept.remote.packet_sender import run_path
from lightning_accept.remote.peer import Peer, Reply
from lightning_accept.remote.wire import unpack_state

HANDOVER_SECONDS = 30.0
"""Seconds within which the compute thread of a stage must come to a handover; nothing is in flight then."""


@dataclass(frozen=True)
class Kept:
    """The state of a worker's previous stage, kept until all stages of the next term stand.

    Attributes:
        term: The term of the stage.
        state: All of its state.
    """

    term: int
    state: StageState


class Source(Protocol):
    """Another worker of the same run, as seen by the one that takes layers over."""

    def handover(self, run: str, term: int, names: Sequence[str]) -> StageState:
        """What its stage of ``term`` holds of ``names``.

        Raises:
            TransportError: If it cannot be reached within the deadline.
            PipelineError: If it refuses.
        """

    def close(self) -> None:
        """End a :meth:`handover` in progress."""


class HttpSource:
    """A :class:`Source` at ``url``.

    Args:
        url: The worker's URL.
        link_token: The run's link token.
        timeout: Seconds for which lost requests are repeated.
        cafile: Certificates against which the worker's is checked; None for the system's.
    """

    def __init__(self, url: str, link_token: str, *, timeout: float = 60.0, cafile: str | None = None) -> None:
        self._interrupter = Interrupter()
        self._peer = Peer(url, link_token, timeout=timeout, cafile=cafile, interrupter=self._interrupter)

    def handover(self, run: str, term: int, names: Sequence[str]) -> StageState:
        """See :class:`Source`."""
        return request_handover(self._peer, run, term, names, HANDOVER_SECONDS)

    def close(self) -> None:
        """See :class:`Source`."""
        self._interrupter.interrupt()
        self._peer.close()


def request_handover(peer: Peer, run: str, term: int, names: Sequence[str], seconds: float) -> StageState:
    """Ask the worker behind ``peer`` for what its stage of ``term`` holds of ``names``.

    Args:
        peer: The worker.
        run: The run.
        term: The term.
        names: As in :class:`lightning_accept.pipeline.messages.Sources`.
        seconds: Seconds within which the stage must come to it, the transfer left out.

    Raises:
        PipelineError: As :meth:`Peer.request`, or if what comes is not a state.
    """
    reply: Reply = peer.request(
        "POST",
        f"{run_path(run)}/handover",
        "the handover of layers",
        query={"wait": f"{seconds:.3f}"},
        body=json.dumps({"term": term, "names": list(names)}).encode(),
        wait=seconds,
    )
    try:
        return unpack_state(reply.body)
    except WireError as error:
        raise PipelineError(f"worker {peer.url} handed over something that is not a state: {error}") from error


def read_request(body: bytes) -> tuple[int, list[str]]:
    """The term and the names that a handover is asked for.

    Raises:
        WireError: If it is no such request.
    """
    fields: Any = load_json(body, "handover")
    term, names = (fields.get("term"), fields.get("names")) if isinstance(fields, dict) else (None, None)
    if type(term) is not int or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WireError("a handover names its 'term', a whole number, and 'names', a list of texts")
    return term, names


def take_over(
    deployment: Deployment, kept: Kept | None, open_source: Callable[[str], Source], where: str
) -> tuple[Deployment, int]:
    """Complete ``deployment`` from its sources.

    Args:
        deployment: The deployment of a move.
        kept: The state of this worker's own previous stage.
        open_source: From an address to the worker there.
        where: This worker's URL, for messages.

    Returns:
        The deployment without sources, and the bytes that came from other workers.

    Raises:
        SourceUnreachable: If a source cannot be reached.
        PipelineError: If a source refuses, or does not hold what was to come from there; the message names both.
    """
    carried = 0
    while deployment.sources is not None and deployment.sources.names:
        address, names = next(iter(deployment.sources.names.items()))
        term = deployment.sources.term
        if address:
            part = _pull(deployment, address, names, term, open_source, where)
            carried += nbytes(part)
        elif kept is None or kept.term != term:
            raise WrongTerm(
                f"worker {where} no longer has its stage of term {term}, whose layers stage {deployment.stage} goes on"
                " with; it was restarted or released meanwhile. Start again from the last checkpoint"
            )
        else:
            part = kept.state
        try:
            deployment = completed(deployment, part, address)
        except ValueError as error:
            raise PipelineError(
                f"worker {where} took over layers of stage {deployment.stage} from {address or 'itself'}, but {error}"
            ) from error
    return deployment, carried


def _pull(
    deployment: Deployment,
    address: str,
    names: Sequence[str],
    term: int,
    open_source: Callable[[str], Source],
    where: str,
) -> StageState:
    what = f"worker {where} could not take over layers of stage {deployment.stage} from worker {address}"
    try:
        source = open_source(address)
        try:
            return source.handover(deployment.run, term, names)
        finally:
            source.close()
    except StageFault:
        raise
    except TransportError as error:
        raise SourceUnreachable(
            f"{what}: {error}. Workers must reach each other: check that {address} is an address of that worker in the"
            f" network of {where}, and that no firewall is in between",
            address,
        ) from error
    except (PipelineError, ValueError) as error:
        raise PipelineError(
            f"{what}: {error}. If worker {address} was restarted or released meanwhile, start again from the last"
            " checkpoint"
        ) from error
