"""What stages, workers and the central node say to each other, independent of the transport."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_accept.codecs import Payload

Kind = Literal["forward", "backward", "flush", "step", "evaluate"]
Direction = Literal["down", "up"]


@dataclass(frozen=True)
class Transfer:
    """A message's way over a link, as a measurement of the link.

    Attributes:
        nbytes: Bytes that were carried, framing included.
        seconds: How long that took, without the time for which the receiver had no room. One round trip is included.
        round_trip: Seconds that an empty message takes; 0.0 where ``seconds`` holds nothing but the bytes' passing.
    """

    nbytes: int
    seconds: float
    round_trip: float = 0.0


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
        transfer: How it came to the central node, where that was measured. Does not travel.
    """

    kind: Kind
    run: str
    term: int
    job: int
    meta: dict[str, Any] = field(default_factory=dict)
    payloads: tuple[Payload | None, ...] = ()
    transfer: Transfer | None = field(default=None, compare=False)

    @property
    def direction(self) -> Direction:
        """``down`` from the central node towards the last worker, ``up`` the other way."""
        return "up" if self.kind in ("backward", "step") else "down"

    @property
    def nbytes(self) -> int:
        """Size of the payloads in bytes, without the framing."""
        return sum(payload.nbytes for payload in self.payloads if payload is not None)


@dataclass(frozen=True)
class Sources:
    """Where a worker finds the part of its new stage that already lies with workers.

    Attributes:
        term: The term of the stages that it is taken from.
        names: By the address of the worker that holds them, or by "" for the worker's own previous stage: what to take
            (``param/NAME``, ``buffer/NAME``, ``const/NAME``). A parameter brings its optimizer state and the gradient
            that waits for its optimizer step.
    """

    term: int
    names: dict[str, list[str]]


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
        sources: In a move, what is not among ``tensors`` because workers hold it. The worker then keeps its previous
            stage's state for others until it is told to forget it. None where all is in ``tensors``.
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
    sources: Sources | None = None


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
class StageReport:
    """What one stage tells about itself with every gradient.

    Attributes:
        forward: Seconds of the last job's forward.
        backward: Seconds of the same job's backward.
        step: Seconds of the last optimizer step; 0.0 before the first.
        down: Bits per second of the way to the next stage (from the last one: to the central node); None if unknown.
        up: Bits per second of the way to the previous stage (from stage 0: to the last one); None if unknown.
    """

    forward: float
    backward: float
    step: float = 0.0
    down: float | None = None
    up: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """The report as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> StageReport:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: If it is not a report.
        """
        names = ("forward", "backward", "step", "down", "up")
        if not isinstance(fields, dict) or set(fields) != set(names):
            raise ValueError(f"a stage's report has the fields {', '.join(names)}")
        for name in names:
            value = fields[name]
            if value is None and name in ("down", "up"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"a stage reports {name}={value!r}")
        return cls(**fields)


def reports_in(meta: dict[str, Any]) -> dict[int, StageReport]:
    """The reports of all stages that a gradient has passed, by stage number.

    Args:
        meta: The ``backward`` packet's metadata.

    Raises:
        PipelineError: If they are not what stages report.
    """
    try:
        return {int(stage): StageReport.from_json(fields) for stage, fields in meta.get("times", {}).items()}
    except (AttributeError, ValueError) as error:
        raise PipelineError(
            f"the gradient of batch {meta.get('batch')} carries reports that make no sense: {error}"
        ) from error


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


class SourceUnreachable(TransportError):
    """A worker could not reach another that holds a part of its new stage; ``address`` is the other's."""

    def __init__(self, message: str, address: str) -> None:
        super().__init__(message)
        self.address = address
