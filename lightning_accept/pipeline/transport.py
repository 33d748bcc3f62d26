"""The narrow interface between the pipeline and whatever carries its messages."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_accept.pipeline.messages import Deployment, Direction, Fault, Packet, StageState


class Channel(Protocol):
    """One stage's way to one neighbour."""

    def send(self, packet: Packet) -> None:
        """Hand ``packet`` over; return when the neighbour has taken it.

        Called from one sender thread at a time. Retries lost requests and waits out back-pressure until its deadline.

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

    def stats(self) -> dict[str, Any]:
        """JSON-able figures: jobs done, seconds of compute and waiting, queue lengths, bytes per link."""

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

    def claim(self, run: str, holder: str) -> dict[str, Any]:
        """Take the worker for ``run``; returns its facts (version, device, threads, memory).

        Raises:
            PipelineError: If it is busy (with who holds it and since when), refuses the token, or is not there.
        """

    def deploy(self, deployment: Deployment) -> None:
        """Put a stage on the worker, replacing the one of an earlier term."""

    def send(self, packet: Packet) -> None:
        """As :meth:`Channel.send`."""

    def receive(self, direction: Direction, timeout: float) -> Packet | None:
        """The next packet that this worker addresses to the central node in ``direction``.

        Each comes exactly once and in the order of sending; None if there is none within ``timeout`` seconds. One
        caller at a time per direction.
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

    def close(self) -> None:
        """Interrupt all calls in progress. Idempotent."""

    def release(self) -> None:
        """Give the worker back: the stage is dropped and the worker is free. Idempotent; never raises."""
