"""What comes back to the central node, and what went wrong, for the one thread that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_accept.codecs import CodecError, decode
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.link_meter import LinkMeter
from lightning_accept.pipeline.messages import Direction, Packet, PipelineError, StageFault, TransportError
from lightning_accept.pipeline.sender import describe
from lightning_accept.pipeline.transport import WorkerHandle

POLL_SECONDS = 1.0

Delivery = tuple[dict[str, Any], list[Tensor | None]]


class Mailbox:
    """Collects packets and faults of all workers in threads of its own.

    Args:
        workers: All workers, in the order of their stages. Those with no stage at present are watched too.
        device: Where decoded tensors are put.
        on_packet: Told of every packet, by the thread that received it.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        workers: list[WorkerHandle],
        device: torch.device,
        on_packet: Callable[[Packet], None] = lambda packet: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._device = device
        self._on_packet = on_packet
        self._clock = clock
        self._lock = threading.Condition()
        self._mail: dict[tuple[str, int], Delivery] = {}
        self._error: BaseException | None = None
        self._meters: dict[Direction, LinkMeter] = {"down": LinkMeter(), "up": LinkMeter()}
        self._bytes: dict[Direction, int] = {"down": 0, "up": 0}
        self._closed = threading.Event()
        self._term = 0
        self._ends: dict[Direction, WorkerHandle] = {"down": workers[-1], "up": workers[0]}
        self._receivers: dict[tuple[Direction, int], threading.Thread] = {}
        self._threads = [
            threading.Thread(target=self._watch, args=(worker,), name=f"watch {worker.name}", daemon=True)
            for worker in workers
        ]

    def start(self) -> None:
        """Start watching, and receiving from the first and the last worker."""
        for thread in self._threads:
            thread.start()
        self.follow(self._ends["up"], self._ends["down"])

    def follow(self, first: WorkerHandle, last: WorkerHandle) -> None:
        """Receive gradients from the worker ``first`` and outputs from the worker ``last`` from now on."""
        with self._lock:
            self._ends = {"down": last, "up": first}
            self._lock.notify_all()
        for direction, worker in self._ends.items():
            # Each keeps its thread, which waits for its turn: an earlier end may be asked in vain for a second more.
            if (direction, id(worker)) not in self._receivers:
                thread = threading.Thread(
                    target=self._receive, args=(worker, direction), name=f"receive from {worker.name}", daemon=True
                )
                self._receivers[direction, id(worker)] = thread
                self._threads.append(thread)
                thread.start()

    def new_term(self, term: int) -> None:
        """Receive packets of ``term`` from now on and drop what is left of earlier terms."""
        with self._lock:
            self._term = term
            self._mail.clear()
            self._bytes = {"down": 0, "up": 0}
            self._meters = {"down": LinkMeter(), "up": LinkMeter()}

    def speed(self, direction: Direction) -> Speed | None:
        """How fast packets come in; None while nothing has told."""
        return self._meters[direction].speed

    def stats(self, direction: Direction) -> dict[str, float | None]:
        """JSON-able figures: payload bytes received in this term, ``bandwidth`` in bits per second, or None."""
        return {"payload_bytes": self._bytes[direction], "bandwidth": self._meters[direction].bandwidth}

    def fail(self, error: BaseException) -> None:
        """Make the waiting thread raise ``error``. The first error counts; a fault's own report beats its echo."""
        with self._lock:
            if self._error is None or (isinstance(error, StageFault) and isinstance(self._error, TransportError)):
                self._error = error
            self._lock.notify_all()

    @property
    def failed(self) -> bool:
        """Whether something went wrong."""
        return self._error is not None

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise self._error

    def wait(self, kind: str, job: int, what: str, timeout: float) -> Delivery:
        """The packet of this kind and job, as metadata and decoded tensors; handed out once.

        Raises:
            PipelineError: If it has not come within ``timeout`` seconds, naming ``what``, or what went wrong meanwhile.
        """
        deadline = self._clock() + timeout
        with self._lock:
            while True:
                self.check()
                found = self._mail.pop((kind, job), None)
                if found is not None:
                    return found
                left = deadline - self._clock()
                if left <= 0:
                    urls = ", ".join(worker.name for worker in self._workers)
                    raise PipelineError(
                        f"waited {timeout:g} s for {what}, which did not come; all workers answer ({urls}). If the"
                        " links are that slow, raise AccEPTStrategy(batch_timeout=...)"
                    )
                self._lock.wait(left)

    def close(self) -> None:
        """End all threads. Idempotent."""
        self._closed.set()
        with self._lock:
            self._lock.notify_all()
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5.0)

    def _receive(self, worker: WorkerHandle, direction: Direction) -> None:
        while self._is_turn_of(worker, direction):
            try:
                packet = worker.receive(direction, POLL_SECONDS)
                if packet is not None:
                    if packet.transfer is not None:
                        self._meters[direction].add(packet.transfer)
                    self._bytes[direction] += packet.nbytes
                    self._on_packet(packet)
                    self._put(packet, worker)
            except Exception as error:
                if self._ends[direction] is not worker:
                    continue  # its stage was dropped
                if not self._closed.is_set():
                    self.fail(error)
                return

    def _is_turn_of(self, worker: WorkerHandle, direction: Direction) -> bool:
        """Wait until ``worker`` is the one to receive from; False once the mailbox is closed."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed.is_set() or self._ends[direction] is worker)
            return not self._closed.is_set()

    def _put(self, packet: Packet, worker: WorkerHandle) -> None:
        try:
            tensors = [None if p is None else decode(p).to(self._device) for p in packet.payloads]
        except CodecError as error:
            what = describe(packet.kind, packet.meta)
            raise PipelineError(f"{what} from {worker.name} cannot be decoded: {error}") from error
        with self._lock:
            if packet.term == self._term:
                self._mail[packet.kind, packet.job] = (packet.meta, tensors)
                self._lock.notify_all()

    def _watch(self, worker: WorkerHandle) -> None:
        while not self._closed.is_set():
            try:
                fault = worker.poll(POLL_SECONDS)
            except Exception as error:
                if not self._closed.is_set():
                    self.fail(error)
                return
            if fault is not None:
                self.fail(StageFault(fault))
                return
