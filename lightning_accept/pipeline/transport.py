"""The narrow interface between the pipeline and whatever carries its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.events import EventReply
from lightning_accept.pipeline.messages import Deployment, Direction, Fault, Packet, StageState, Transfer

if TYPE_CHECKING:
    from lightning_accept.latency.profile import Profile, ProfileRequest


class Channel(Protocol):
    """One stage's way to one neighbour."""

    overlaps: bool
    """Whether two packets may be under way at a time, so that no answer is waited for between them."""

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer | None:
        """Hand ``packet`` over; return when the neighbour has taken it.

        Called from one sender thread at a time; where it overlaps, from two. Retries lost requests and waits out
        back-pressure until its deadline.

        Args:
            packet: The packet.
            on_left: Called, perhaps several times, when all of it has left this device, but the answer is still to
                come. The next packet may follow then.

        Returns:
            How long the packet was on the link; None where that cannot be told.

        Raises:
            TransportError: If the neighbour did not take it within the deadline.
            StageFault: If the neighbour has failed and says why.
        """

    def close(self) -> None:
        """Give up: a :meth:`send` in progress raises :class:`TransportError` soon."""


class StageHost(Protocol):
    """What a worker daemon drives: the stage that runs on this device. Implemented by ``pipeline.runner``."""

    def start(self) -> None:
        """Start the threads."""

    def deliver(self, packet: Packet) -> None:
        """Take a packet from a neighbour. Never blocks for long. A packet that was already taken is ignored.

        Raises:
            QueueFull: If there is no room at present.
            WrongTerm: If run or term differ.
            StageFault: If this stage has failed.
            ValueError: If the packet makes no sense here.
        """

    def state(self, timeout: float) -> StageState:
        """The stage's state once the work accepted so far that can be done is done.

        Raises:
            StageFault: If this stage has failed.
            TimeoutError: If the compute thread did not come to it in time.
        """

    def handover(self, names: Sequence[str] | None, timeout: float) -> StageState:
        """The part of the stage's state that belongs to ``names``, for the stage that holds it from now on.

        Args:
            names: As in :class:`Sources`. None takes everything, without a copy: this stage does no more work then.
            timeout: Seconds within which the compute thread must come to it.

        Raises:
            StageFault: If this stage has failed.
            TimeoutError: If the compute thread did not come to it in time.
            ValueError: If the stage does not hold one of the names.
        """

    def stats(self) -> dict[str, Any]:
        """JSON-able figures: jobs done, seconds of compute and waiting, queue lengths, bytes per link."""

    def events(self, term: int, after: int) -> dict[str, Any]:
        """What the stage and its links did, as :func:`lightning_accept.pipeline.events.events_to_json` has it.

        Args:
            term: The term of the stage that was asked before.
            after: Number of the last event that is known of it; that of another term does not count.
        """

    @property
    def fault(self) -> Fault | None:
        """Why the stage stopped, or None."""

    def close(self) -> None:
        """End all threads; idempotent."""


class WorkerHandle(Protocol):
    """The central node's view of one worker. Methods raise :class:`TransportError` past their deadline."""

    name: str
    """What names the worker in messages: its URL."""

    address: str
    """What a neighbouring worker needs to reach it (``Deployment.upstream`` and ``downstream``)."""

    def claim(self, run: str, holder: str, link_token: str) -> dict[str, Any]:
        """Take the worker for ``run``; returns its facts (version, device, threads, memory).

        Other workers of the run address it with ``link_token`` from now on.

        Raises:
            PipelineError: If it is busy (with who holds it and since when), refuses the token, or is not there.
        """

    def deploy(self, deployment: Deployment, timeout: float | None = None) -> int:
        """Put a stage on the worker, replacing the one of an earlier term.

        Args:
            deployment: The stage.
            timeout: Seconds that the worker may take to build it and to fetch what others hold, its own transfer left
                out; by default those within which it must answer anything.

        Returns:
            Bytes of state that the worker fetched from other workers.

        Raises:
            SourceUnreachable: If the worker cannot reach one of the deployment's sources. The deployment may be
                repeated with what that source holds among its tensors.
        """

    def handover(self, term: int, names: Sequence[str], timeout: float) -> StageState:
        """What the worker's stage of ``term`` holds of ``names``; see :class:`Sources` and :meth:`StageHost.handover`.

        Raises:
            WrongTerm: If the worker holds no stage of that term, nor keeps its state.
        """

    def forget(self, term: int) -> None:
        """Make the worker drop a stage of a term before ``term``, and what it keeps of one for others."""

    def profile(self, request: ProfileRequest, timeout: float) -> Profile:
        """Measure sub-models on the worker, which takes as long as the request allows.

        Raises:
            PipelineError: If the worker cannot make sense of the request.
            TransportError: If it takes more than ``timeout`` seconds.
        """

    def measure_link(self, seconds: float) -> tuple[Speed, Speed]:
        """Measure the link from here to the worker, and back, within about ``seconds`` each.

        Not while packets travel: the two would share the link.
        """

    def measure_link_to(self, address: str, seconds: float) -> Speed:
        """Measure the link from the worker to the one at ``address``, which the same run has claimed."""

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer | None:
        """As :meth:`Channel.send`; packets may overlap."""

    def receive(self, direction: Direction, timeout: float) -> Packet | None:
        """The next packet that this worker addresses to the central node in ``direction``.

        Each comes exactly once and in the order of sending; None if there is none within ``timeout`` seconds. One
        caller at a time per direction. :attr:`Packet.transfer` tells how fast it came, where that was measured.
        """

    def state(self, timeout: float) -> StageState:
        """Gather the stage's state."""

    def poll(self, timeout: float) -> Fault | None:
        """Wait up to ``timeout`` seconds for a fault; None if there is none. Renews the lease.

        Raises:
            TransportError: If the worker does not answer.
        """

    def stats(self) -> dict[str, Any]:
        """As :meth:`StageHost.stats`."""

    def events(self, term: int, after: int) -> EventReply:
        """As :meth:`StageHost.events`; with the worker's clock only, in term 0, where it holds no stage."""

    def close(self) -> None:
        """Interrupt all calls in progress. Idempotent."""

    def release(self) -> None:
        """Give the worker back: the stage is dropped and the worker is free. Idempotent; never raises."""
