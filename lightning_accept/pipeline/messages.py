"""What stages, workers and the central node say to each other, independent of the transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_accept.codecs import Payload

Kind = Literal["forward", "backward", "flush", "step", "evaluate"]
Direction = Literal["down", "up"]


@dataclass(frozen=True)
class Packet:
    """One message between neighbouring stages.

    Attributes:
        kind: ``forward`` and ``flush`` travel down the chain, as does ``evaluate`` (a forward without gradients);
            ``backward`` travels up. ``step`` goes from the central node to every worker.
        run: The run that the packet belongs to.
        term: Raised by one at every deployment; a packet of another term is refused.
        job: The number of the job, counted from 0 in every term and separately for each kind of work: training jobs
            (``forward``, ``backward`` and ``flush`` share one numbering), ``evaluate`` jobs, and ``step`` requests.
        meta: JSON-able facts (batch, micro-batch, hyper-parameters, stage times, ...).
        payloads: The encoded tensors, in the order of the cut's values. None where there is no tensor (a gradient
            that does not exist).
    """

    kind: Kind
    run: str
    term: int
    job: int
    meta: dict[str, Any] = field(default_factory=dict)
    payloads: tuple[Payload | None, ...] = ()

    @property
    def direction(self) -> Direction:
        """``down`` from the central node towards the last worker, ``up`` the other way."""
        return "up" if self.kind in ("backward", "step") else "down"

    @property
    def nbytes(self) -> int:
        """Size of the payloads in bytes, without the framing."""
        return sum(payload.nbytes for payload in self.payloads if payload is not None)


@dataclass(frozen=True)
class Deployment:
    """All that a worker needs to hold one stage of one run.

    Attributes:
        run: The run.
        term: The term, raised by one at every deployment.
        stage: Number of this stage; 0 is the central node, the last worker is ``stages - 1``.
        stages: Number of stages, the central node's included.
        spec: JSON-able description of the stage; its layout is the business of :mod:`lightning_accept.pipeline`.
        tensors: Parameters, buffers, constants and optimizer state, by name.
        upstream: URL of the worker that holds the previous stage; None if that is the central node.
        downstream: URL of the worker that holds the next stage; None if the output returns to the central node.
        link_token: The bearer token with which neighbours of this run address each other.
    """

    run: str
    term: int
    stage: int
    stages: int
    spec: dict[str, Any]
    tensors: dict[str, Tensor]
    upstream: str | None
    downstream: str | None
    link_token: str


@dataclass(frozen=True)
class StageState:
    """The trained state of one stage, as gathered by the central node.

    Attributes:
        spec: JSON-able part (optimizer scalars, counters).
        tensors: Parameters, buffers and optimizer state, by name.
    """

    spec: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """Why a stage stopped.

    Attributes:
        stage: Number of the stage.
        layers: Names of the layers in it.
        where: URL of the worker, or ``central node``.
        doing: What the stage was doing, for example ``forward of batch 7``.
        error: The error's type and message in one line.
        traceback: The formatted traceback on the machine where it happened.
    """

    stage: int
    layers: tuple[str, ...]
    where: str
    doing: str
    error: str
    traceback: str


class PipelineError(RuntimeError):
    """The pipeline cannot go on."""


class StageFault(PipelineError):
    """A stage failed; the message names stage, layers and worker, and carries the remote traceback."""

    def __init__(self, fault: Fault) -> None:
        layers = ", ".join(fault.layers) if fault.layers else "no layers"
        super().__init__(
            f"stage {fault.stage} ({layers}) on {fault.where} failed in the {fault.doing}: {fault.error}\n"
            f"--- traceback on {fault.where} ---\n{fault.traceback.rstrip()}"
        )
        self.fault = fault


class QueueFull(Exception):
    """The receiver's queue is full; try again after ``retry_after`` seconds. Back-pressure, not an error."""

    def __init__(self, retry_after: float = 0.05) -> None:
        super().__init__(f"queue full, retry after {retry_after} s")
        self.retry_after = retry_after


class WrongTerm(PipelineError):
    """A packet belongs to another run or term than the one that is deployed here."""


class TransportError(PipelineError):
    """A peer could not be reached within the deadline; the message names it and says what was to be sent."""
