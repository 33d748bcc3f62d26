"""Workers in this process, for tests and debugging: the same contracts as over HTTP, without a network."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_accept.latency.profile import Profile, ProfileRequest, ProfileStopped, run_profile
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.events import EventReply, events_from_json, no_events
from lightning_accept.pipeline.handover import part_of
from lightning_accept.pipeline.messages import (
    Deployment,
    Direction,
    Fault,
    Packet,
    PipelineError,
    QueueFull,
    StageFault,
    StageState,
    Transfer,
    TransportError,
    WrongTerm,
)
from lightning_accept.pipeline.transport import Channel, StageHost
from lightning_accept.remote.disturb import Disturbance
from lightning_accept.remote.handover import HANDOVER_SECONDS, Kept, take_over
from lightning_accept.remote.outbox import Outbox
from lightning_accept.remote.tenancy import StageFactory
from lightning_accept.remote.wire import (
    PROTOCOL,
    pack_deployment,
    pack_packet,
    pack_profile_request,
    pack_state,
    unpack_deployment,
    unpack_packet,
    unpack_profile_request,
    unpack_state,
)
from lightning_accept.version import __version__

Disturb = Callable[[Packet], Disturbance]
Profiler = Callable[[str, ProfileRequest], Profile]
Links = Callable[["str | None", "str | None"], Speed]

_RETRY_PAUSE = 0.005
_FAULT_INTERVAL = 0.01


class MemoryCluster:
    """``count`` workers in this process, at ``memory://1``, ``memory://2``, ...

    Args:
        count: Number of workers.
        make_stage: Builds their stages.
        disturb: What happens to every packet on its way; called from several threads.
        through_wire: Turn everything into frames and back, as HTTP does. Otherwise packets to workers pass as they
            are.
        device: Where stages compute.
        timeout: Seconds after which a packet that is not taken is given up.
        profiler: Called with a worker's address and what is to be measured there, in place of measuring it.
        links: The speed of the way from one address to another (None is the central node), which is what measuring
            and packets tell; nothing is slowed down. By default no time passes on links.
    """

    def __init__(
        self,
        count: int,
        make_stage: StageFactory,
        disturb: Disturb | None = None,
        *,
        through_wire: bool = True,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
        profiler: Profiler | None = None,
        links: Links | None = None,
    ) -> None:
        self.profiler = profiler
        self.links = links
        self.make_stage = make_stage
        self.disturb = disturb
        self.through_wire = through_wire
        self.device = torch.device(device)
        self.timeout = timeout
        self.apart: set[tuple[str, str]] = set()
        """Pairs of addresses: the first cannot fetch layers from the second."""
        self.workers = [MemoryWorker(self, f"memory://{number}") for number in range(1, count + 1)]

    def speed(self, source: str | None, target: str | None) -> Speed:
        """The speed of the way from ``source`` to ``target``."""
        return Speed() if self.links is None else self.links(source, target)

    def transfer(self, source: str | None, target: str | None, nbytes: int) -> Transfer | None:
        """How long so many bytes take; None if that is no time anyway."""
        if self.links is None:
            return None
        there, back = self.speed(source, target), self.speed(target, source)
        round_trip = there.latency + back.latency
        return Transfer(nbytes, 8.0 * nbytes / there.bandwidth + round_trip, round_trip)

    def worker_at(self, address: str) -> MemoryWorker:
        """The worker whose address is ``address``; PipelineError if there is none."""
        for worker in self.workers:
            if worker.address == address:
                return worker
        raise PipelineError(f"there is no worker {address} in this cluster of {len(self.workers)}")

    def close(self) -> None:
        """Release every worker."""
        for worker in self.workers:
            worker.close()
            worker.release()


class MemoryChannel:
    """A channel from a worker or the central node to a worker of the cluster, with whatever disturbs its packets."""

    overlaps = True

    def __init__(self, cluster: MemoryCluster, source: str | None, address: str) -> None:
        self._cluster = cluster
        self._source = source
        self._address = address
        self._closed = threading.Event()
        self._late: list[Packet] = []

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer | None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.send`."""
        if on_left is not None:
            on_left()
        cluster = self._cluster
        disturbance = _suffer(cluster, packet, self._closed)
        if cluster.through_wire:
            packet = unpack_packet(pack_packet(packet))
        for _ in range(disturbance.losses):
            self._closed.wait(_RETRY_PAUSE)
        self._deliver(packet)
        late, self._late = self._late, []
        duplicates = [packet] * disturbance.duplicates
        if disturbance.late:
            self._late = duplicates
            duplicates = []
        for duplicate in late + duplicates:
            self._deliver(duplicate)
        return cluster.transfer(self._source, self._address, packet.nbytes)

    def _deliver(self, packet: Packet) -> None:
        deadline = time.monotonic() + self._cluster.timeout
        while True:
            if self._closed.is_set():
                raise TransportError(f"the {packet.kind} of job {packet.job} to {self._address} was interrupted")
            try:
                self._cluster.worker_at(self._address).deliver(packet)
                return
            except QueueFull as full:
                if time.monotonic() + full.retry_after > deadline:
                    raise TransportError(
                        f"worker {self._address} did not take the {packet.kind} of job {packet.job} within"
                        f" {self._cluster.timeout:g} s: {full}"
                    ) from full
                self._closed.wait(full.retry_after)
            except ValueError as error:
                raise PipelineError(
                    f"worker {self._address} refused the {packet.kind} of job {packet.job}: {error}"
                ) from error

    def close(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.close`."""
        self._closed.set()


class _DisturbedOutbox(Outbox):
    """The way to the central node. Its numbering makes up for loss and duplicates, so only the delay is felt."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._interrupted = threading.Event()

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> None:
        _suffer(self._cluster, packet, self._interrupted)
        super().send(packet)

    def close(self) -> None:
        self._interrupted.set()
        super().close()


def _suffer(cluster: MemoryCluster, packet: Packet, interrupted: threading.Event) -> Disturbance:
    disturbance = Disturbance() if cluster.disturb is None else cluster.disturb(packet)
    interrupted.wait(disturbance.delay)
    return disturbance


class _MemorySource:
    """One worker of the cluster, as seen by another that takes layers over."""

    def __init__(self, cluster: MemoryCluster, seen_from: str, address: str) -> None:
        self._cluster = cluster
        self._seen_from = seen_from
        self._address = address

    def handover(self, run: str, term: int, names: Sequence[str]) -> StageState:
        if (self._seen_from, self._address) in self._cluster.apart:
            raise TransportError(f"worker {self._address} could not be reached")
        return self._cluster.worker_at(self._address).handover(term, names, HANDOVER_SECONDS)

    def close(self) -> None:
        pass


class MemoryWorker:
    """A :class:`~lightning_accept.pipeline.transport.WorkerHandle` and the worker behind it."""

    def __init__(self, cluster: MemoryCluster, address: str) -> None:
        self.name = self.address = address
        self.unreachable = False
        """Set to True to make the worker vanish: every call then raises TransportError at once."""
        self._cluster = cluster
        self._run = ""
        self._holder = ""
        self._closed = False
        self._host: StageHost | None = None
        self._term: int | None = None
        self._kept: Kept | None = None
        self._handing = threading.Lock()
        self._terms = threading.Condition()
        self._outboxes: dict[Direction, Outbox] = {}
        self._received: dict[Direction, int] = {}
        self._sending = MemoryChannel(cluster, None, address)

    def claim(self, run: str, holder: str, link_token: str) -> dict[str, Any]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.claim`."""
        self._check()
        if self._run and (self._run, self._holder) != (run, holder):
            raise PipelineError(f"worker {self.name} is busy: held by {self._holder} (run {self._run})")
        if self._closed:
            self._closed = False
            self._sending = MemoryChannel(self._cluster, None, self.address)
        self._run, self._holder = run, holder
        return {
            "version": __version__,
            "protocol": PROTOCOL,
            "device": str(self._cluster.device),
            "threads": torch.get_num_threads(),
            "host": f"process {os.getpid()}",
        }

    def deploy(self, deployment: Deployment, timeout: float | None = None) -> int:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.deploy`."""
        self._check()
        if deployment.run != self._run or (self._term is not None and deployment.term <= self._term):
            raise WrongTerm(f"worker {self.name} refused term {deployment.term} of run {deployment.run}")
        if self._cluster.through_wire:
            deployment = unpack_deployment(pack_deployment(deployment))
        self._set_aside(keep=deployment.sources is not None)
        open_source = partial(_MemorySource, self._cluster, self.address)
        deployment, fetched = take_over(deployment, self._kept, open_source, self.name)
        outboxes: dict[Direction, Outbox] = {
            "up": _DisturbedOutbox(self._cluster),
            "down": _DisturbedOutbox(self._cluster),
        }
        upstream = self._channel(deployment.upstream, outboxes["up"])
        downstream = self._channel(deployment.downstream, outboxes["down"])
        try:
            host = self._cluster.make_stage(
                deployment, device=self._cluster.device, upstream=upstream, downstream=downstream, where=self.name
            )
        except ValueError as error:
            raise PipelineError(f"worker {self.name} refused stage {deployment.stage}: {error}") from error
        except Exception as error:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            line = f"{type(error).__name__}: {error}"
            raise StageFault(Fault(deployment.stage, (), self.name, "deployment", line, trace)) from error
        host.start()
        with self._terms:
            self._host, self._term, self._outboxes = host, deployment.term, outboxes
            self._received = {"up": 0, "down": 0}
            self._terms.notify_all()
        return fetched

    def _set_aside(self, keep: bool) -> None:
        with self._handing:
            if not keep:
                self._kept = None
            elif self._host is not None:
                assert self._term is not None
                self._kept = Kept(self._term, self._host.handover(None, HANDOVER_SECONDS))
            self._drop()

    def handover(self, term: int, names: Sequence[str], timeout: float) -> StageState:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.handover`."""
        self._check()
        try:
            with self._handing:
                if self._kept is not None and self._kept.term == term:
                    state = part_of(self._kept.state, names)
                elif self._term == term and self._host is not None:
                    state = self._host.handover(names, timeout)
                else:
                    raise WrongTerm(f"worker {self.name} has no stage of term {term} to hand layers over from")
        except TimeoutError as error:
            raise TransportError(f"worker {self.name}, the handover of layers: {error}") from error
        except ValueError as error:
            raise PipelineError(f"worker {self.name} refused the handover of layers: {error}") from error
        return unpack_state(pack_state(state)) if self._cluster.through_wire else state

    def forget(self, term: int) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.forget`."""
        self._check()
        with self._handing:
            if self._kept is not None and self._kept.term < term:
                self._kept = None
            if self._term is not None and self._term < term:
                self._drop()

    def _channel(self, address: str | None, outbox: Outbox) -> Channel:
        return outbox if address is None else MemoryChannel(self._cluster, self.address, address)

    def deliver(self, packet: Packet) -> None:
        """The worker's side of :meth:`send`; see :meth:`StageHost.deliver`."""
        if self.unreachable:
            raise TransportError(f"worker {self.name} could not be reached")
        host = self._host
        if host is None:
            raise WrongTerm(f"no stage of run {packet.run} is deployed on {self.name}")
        host.deliver(packet)

    def profile(self, request: ProfileRequest, timeout: float) -> Profile:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.profile`."""
        self._check()
        if self._cluster.through_wire:
            request = unpack_profile_request(pack_profile_request(request))
        if self._cluster.profiler is not None:
            return self._cluster.profiler(self.address, request)
        end = time.monotonic() + timeout
        try:
            return run_profile(
                request, self._cluster.device, stop=lambda: self._closed or not self._run or time.monotonic() > end
            )
        except ProfileStopped as error:
            self._check()
            raise TransportError(f"worker {self.name}, the profile request: {error}") from error

    def measure_link(self, seconds: float) -> tuple[Speed, Speed]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.measure_link`."""
        self._check()
        return self._cluster.speed(None, self.address), self._cluster.speed(self.address, None)

    def measure_link_to(self, address: str, seconds: float) -> Speed:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.measure_link_to`."""
        self._check()
        self._cluster.worker_at(address)._check()
        return self._cluster.speed(self.address, address)

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer | None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.send`."""
        self._check()
        return self._sending.send(packet, on_left)

    def receive(self, direction: Direction, timeout: float) -> Packet | None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.receive`."""
        deadline = time.monotonic() + timeout
        with self._terms:
            self._terms.wait_for(lambda: self._closed or self._host is not None, timeout)
            self._check()
            if self._host is None:
                return None
            outbox, after = self._outboxes[direction], self._received[direction]
        item = outbox.fetch(after, max(0.0, deadline - time.monotonic()))
        self._check()
        if item is None:
            return None
        number, frame = item
        with self._terms:
            if outbox is not self._outboxes.get(direction):
                return None
            self._received[direction] = number
        packet = unpack_packet(frame)
        return replace(packet, transfer=self._cluster.transfer(self.address, None, packet.nbytes))

    def state(self, timeout: float) -> StageState:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.state`."""
        try:
            state = self._deployed().state(timeout)
        except TimeoutError as error:
            raise TransportError(f"worker {self.name}, its state: {error}") from error
        return unpack_state(pack_state(state)) if self._cluster.through_wire else state

    def poll(self, timeout: float) -> Fault | None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.poll`."""
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            host = self._host
            fault = None if host is None else host.fault
            remaining = deadline - time.monotonic()
            if fault is not None or remaining <= 0:
                return fault
            with self._terms:
                self._terms.wait_for(lambda: self._closed, min(remaining, _FAULT_INTERVAL))

    def stats(self) -> dict[str, Any]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.stats`."""
        self._check()
        return {} if self._host is None else self._host.stats()

    def events(self, term: int, after: int) -> EventReply:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.events`."""
        self._check()
        sent, host = time.perf_counter(), self._host
        answer = no_events() if host is None else host.events(term, after)
        return events_from_json(json.loads(json.dumps(answer)), sent, time.perf_counter())

    def close(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.close`."""
        self._sending.close()
        with self._terms:
            self._closed = True
            outboxes = list(self._outboxes.values())
            self._terms.notify_all()
        for outbox in outboxes:
            outbox.close()

    def release(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.release`."""
        with suppress(PipelineError):
            self._drop()
        self._run = self._holder = ""
        self._term = self._kept = None

    def _drop(self) -> None:
        with self._terms:
            host, self._host = self._host, None
            outboxes = list(self._outboxes.values())
            self._terms.notify_all()
        for outbox in outboxes:
            outbox.close()
        if host is not None:
            host.close()

    def _deployed(self) -> StageHost:
        self._check()
        if self._host is None:
            raise WrongTerm(f"no stage is deployed on {self.name}")
        return self._host

    def _check(self) -> None:
        if self.unreachable:
            raise TransportError(f"worker {self.name} could not be reached")
        if self._closed and self._run:
            raise TransportError(f"worker {self.name}: the call was interrupted")
