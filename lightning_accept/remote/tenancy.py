"""Who holds a worker: one run at a time, with a lease that the central node renews by asking for anything."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol, TypeVar

import torch

from lightning_accept.latency.profile import Profile, ProfileRequest, ProfileStopped, run_profile
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.events import no_events
from lightning_accept.pipeline.handover import part_of
from lightning_accept.pipeline.messages import (
    Deployment,
    Direction,
    Fault,
    Packet,
    PipelineError,
    QueueFull,
    StageState,
    WrongTerm,
)
from lightning_accept.pipeline.transport import Channel, StageHost
from lightning_accept.remote.handover import HANDOVER_SECONDS, Kept, Source, take_over
from lightning_accept.remote.inflow import Inflow
from lightning_accept.remote.outbox import Outbox
from lightning_accept.remote.refusal import Refusal, failed
from lightning_accept.remote.tokens import check_token

log = logging.getLogger("lightning_accept.worker")

T = TypeVar("T")

_RUN = re.compile(r"[A-Za-z0-9._-]{1,100}")
_FAULT_INTERVAL = 0.05
"""Seconds between two looks at the stage while a central node waits for a fault."""


class StageFactory(Protocol):
    """Builds the stage that a deployment describes; :func:`lightning_accept.pipeline.runner.build_stage` is the one."""

    def __call__(
        self, deployment: Deployment, *, device: torch.device, upstream: Channel, downstream: Channel, where: str
    ) -> StageHost:
        """Build the stage without starting it; ValueError if the deployment makes no sense here."""


class LinkProbe(Protocol):
    """Measures the link to one neighbour; :class:`lightning_accept.remote.http_probe.LinkProbe` is the one."""

    def measure(self, run: str, seconds: float) -> Speed:
        """The speed of the way there; PipelineError if it cannot be measured."""

    def close(self) -> None:
        """End a measurement in progress; idempotent."""


@dataclass(eq=False)
class Tenant:
    """The run that holds the worker."""

    run: str
    holder: str
    since: str
    heard: float
    link_token: str
    requests: int = 0
    term: int | None = None
    host: StageHost | None = None
    outboxes: dict[Direction, Outbox] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    deploying: asyncio.Lock = field(default_factory=asyncio.Lock)
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    profiled: tuple[str, Profile] | None = None
    kept: Kept | None = None
    handing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the state of the stage of ``term`` is taken; never while another worker is waited for."""
    sources: set[Source] = field(default_factory=set)
    fetched: int = 0
    """Bytes that the last deployment took from other workers."""
    inflows: dict[str, Inflow] = field(default_factory=dict)
    writing: dict[Direction, asyncio.Lock] = field(
        default_factory=lambda: {"up": asyncio.Lock(), "down": asyncio.Lock()}
    )
    """Held while an outbox item is written, so that the next one does not share the link with it."""

    def inflow(self, address: str) -> Inflow:
        """What counts the bytes that come from one network address."""
        return self.inflows.setdefault(address, Inflow())

    def close(self) -> None:
        """Drop the stage; blocks until its threads have ended."""
        # The outboxes first: the stage's senders may be waiting for room in them.
        for outbox in self.outboxes.values():
            outbox.close()
        host, self.host = self.host, None
        if host is not None:
            host.close()


class Tenancy:
    """What a worker does for the run that holds it. All methods run in the event loop's thread.

    Args:
        make_stage: Builds stages.
        make_channel: From a neighbour's URL and the link token to a channel.
        make_source: From the URL of another worker of the run and the link token to a source of layers.
        make_probe: From a neighbour's URL and the link token to what measures the link.
        device: Where stages compute.
        lease: Seconds without a request of the central node after which a run is released.
        patience: Seconds for which a packet waits here for room before its sender is told to try again. A refused
            packet travels twice, which slow links cannot afford.
        clock: Seconds, for the lease.
        tidy: Called after a stage was built or dropped.
    """

    def __init__(
        self,
        make_stage: StageFactory,
        make_channel: Callable[[str, str], Channel],
        make_source: Callable[[str, str], Source],
        make_probe: Callable[[str, str], LinkProbe],
        *,
        device: torch.device,
        lease: float = 60.0,
        patience: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        self.lease = lease
        self.tenant: Tenant | None = None
        self._make_stage = make_stage
        self._make_channel = make_channel
        self._make_source = make_source
        self._make_probe = make_probe
        self._device = device
        self._patience = patience
        self._clock = clock
        self._tidy = tidy
        self._executor = ThreadPoolExecutor(16, thread_name_prefix="worker request")
        self._last_release = ""

    async def blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what blocks or computes outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(function, *arguments))

    async def claim(self, run: str, holder: str, link_token: str) -> None:
        """Take the worker for ``run``, described to others as ``holder``, addressed by neighbours with ``link_token``.

        Raises:
            Refusal: 409 if another run holds it.
        """
        if not _RUN.fullmatch(run) or not 0 < len(holder) <= 200 or not holder.isprintable():
            raise Refusal(400, "claim", "a claim names its run (letters, digits, '._-') and a printable holder")
        if not 0 < len(link_token) <= 200:
            raise Refusal(400, "claim", "a claim holds a link token of up to 200 characters")
        check_token(link_token, "the link token of a claim")
        await self.expire()
        tenant = self.tenant
        if tenant is None:
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self.tenant = Tenant(run, holder, since, self._clock(), link_token)
            log.info("claimed by %s for run %s", holder, run)
        elif (tenant.run, tenant.holder) == (run, holder):
            tenant.heard, tenant.link_token = self._clock(), link_token
        else:
            raise Refusal(
                409,
                "busy",
                f"this worker is busy: held by {tenant.holder} since {tenant.since}",
                run=tenant.run,
                holder=tenant.holder,
                since=tenant.since,
            )

    def of(self, run: str) -> Tenant:
        """The tenant if it is ``run``.

        Raises:
            Refusal: 404 if that run does not hold the worker.
        """
        if self.tenant is None or self.tenant.run != run:
            raise Refusal(404, "run", f"run {run} does not hold this worker{self._last_release}")
        return self.tenant

    @contextmanager
    def hearing(self, tenant: Tenant) -> Iterator[None]:
        """Renew the lease for as long as a request of the central node lasts."""
        tenant.requests += 1
        try:
            yield
        finally:
            tenant.requests -= 1
            tenant.heard = self._clock()

    async def expire(self) -> None:
        """Release the run whose central node has gone silent, if so."""
        tenant = self.tenant
        if tenant is not None and not tenant.requests and self._clock() - tenant.heard > self.lease:
            await self._evict(f"its central node was silent for more than {self.lease:g} s")

    async def release(self, run: str) -> None:
        """Give the worker back; nothing happens if ``run`` does not hold it."""
        if self.tenant is not None and self.tenant.run == run:
            await self._evict("its central node gave it back")

    async def close(self) -> None:
        """Release whoever holds the worker, for good."""
        await self._evict("the worker was stopped")

    def end(self) -> None:
        """Let the threads go; nothing can be asked of the tenancy after that."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _evict(self, reason: str) -> None:
        tenant, self.tenant = self.tenant, None
        if tenant is not None:
            self._last_release = f"; run {tenant.run} was released because {reason}"
            log.info("run %s released: %s", tenant.run, reason)
            tenant.gone.set()
            for source in list(tenant.sources):
                source.close()
            await self.blocking(tenant.close)
            await self.blocking(self._tidy)

    async def deploy(self, tenant: Tenant, deployment: Deployment, where: str) -> int:
        """Put a stage here in place of the one of an earlier term. A repetition changes nothing.

        Returns:
            Bytes of state that came from other workers.

        Raises:
            Refusal: 400 if the stage cannot be built from the deployment, 404 if the run was released meanwhile, 500
                with a fault for any other failure.
            WrongTerm: If run or term are older than what is deployed.
            PipelineError: If layers cannot be taken over from other workers; see :func:`take_over`.
        """
        if deployment.run != tenant.run:
            raise WrongTerm(f"the deployment is of run {deployment.run}, this worker is held by run {tenant.run}")
        async with tenant.deploying:
            if tenant.term is not None and deployment.term <= tenant.term:
                if deployment.term == tenant.term and tenant.host is not None:
                    return tenant.fetched
                raise WrongTerm(f"term {deployment.term} was to be deployed after term {tenant.term}")
            await self._set_aside(tenant, keep=deployment.sources is not None)
            deployment, tenant.fetched = await self.blocking(self._take_over, tenant, deployment, where)
            tenant.term, tenant.link_token = deployment.term, deployment.link_token
            tenant.outboxes = {"up": Outbox(), "down": Outbox()}
            try:
                host = await self.blocking(self._build, deployment, tenant.outboxes, where)
            except ValueError as error:
                raise Refusal(400, "deployment", f"stage {deployment.stage} was refused: {error}") from error
            except Exception as error:
                trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                line = f"{type(error).__name__}: {error}"
                raise failed(Fault(deployment.stage, (), where, "deployment", line, trace)) from error
            tenant.host = host
            await self.blocking(self._tidy)
            if tenant.gone.is_set():
                await self.blocking(tenant.close)
                self.of(tenant.run)
            log.info("stage %d of %d deployed, term %d", deployment.stage, deployment.stages, deployment.term)
            return tenant.fetched

    async def _set_aside(self, tenant: Tenant, keep: bool) -> None:
        """End the stage; keep its state if others may ask for it. What a failed move has kept stays kept."""
        async with tenant.handing:
            if not keep:
                tenant.kept = None
            elif (host := tenant.host) is not None:
                assert tenant.term is not None
                tenant.kept = Kept(tenant.term, await self.blocking(host.handover, None, HANDOVER_SECONDS))
            await self.blocking(tenant.close)

    def _take_over(self, tenant: Tenant, deployment: Deployment, where: str) -> tuple[Deployment, int]:
        def open_source(address: str) -> Source:
            source = self._make_source(address, deployment.link_token)
            tenant.sources.add(source)
            if tenant.gone.is_set():
                source.close()
            return source

        try:
            return take_over(deployment, tenant.kept, open_source, where)
        finally:
            tenant.sources.clear()

    async def handover(self, tenant: Tenant, term: int, names: Sequence[str], wait: float) -> StageState:
        """What the stage of ``term`` holds of ``names``, whether it stands or its state is kept.

        Raises:
            WrongTerm: If there is none.
            ValueError: If it does not hold one of the names.
        """
        async with tenant.handing:
            if tenant.kept is not None and tenant.kept.term == term:
                return part_of(tenant.kept.state, names)
            host = tenant.host
            if tenant.term != term or host is None:
                self.of(tenant.run)
                raise WrongTerm(f"this worker has no stage of term {term} to hand layers over from")
            return await self.blocking(host.handover, names, wait)

    async def forget(self, tenant: Tenant, term: int) -> None:
        """Drop the stage if it is of a term before ``term``, and the state of such a one that was kept."""
        async with tenant.handing:
            if tenant.kept is not None and tenant.kept.term < term:
                tenant.kept = None
            if tenant.term is not None and tenant.term < term and tenant.host is not None:
                await self.blocking(tenant.close)
                log.info("term %d goes on without this worker, which stays claimed", term)

    def _build(self, deployment: Deployment, outboxes: dict[Direction, Outbox], where: str) -> StageHost:
        neighbours: dict[Direction, str | None] = {"up": deployment.upstream, "down": deployment.downstream}
        channels: dict[Direction, Channel] = {}
        for direction, address in neighbours.items():
            if address is None:
                channels[direction] = outboxes[direction]
            else:
                channels[direction] = self._make_channel(address, deployment.link_token)
        host = self._make_stage(
            deployment, device=self._device, upstream=channels["up"], downstream=channels["down"], where=where
        )
        host.start()
        return host

    async def profile(self, tenant: Tenant, request: ProfileRequest, number: str, wait: float) -> Profile:
        """Measure sub-models here. A request that comes again under the same number is not measured again.

        Raises:
            Refusal: 404 if the run was released meanwhile, 500 with the reason if a sub-model cannot be run.
            TimeoutError: If it takes more than ``wait`` seconds.
            ValueError: If the request makes no sense.
        """
        async with tenant.measuring:
            if tenant.profiled is None or tenant.profiled[0] != number:
                end = time.monotonic() + wait

                def stop() -> bool:
                    return tenant.gone.is_set() or time.monotonic() > end

                try:
                    profile = await self.blocking(functools.partial(run_profile, request, self._device, stop=stop))
                except ProfileStopped:
                    self.of(tenant.run)
                    raise TimeoutError(f"measuring took longer than {wait:g} s") from None
                except ValueError:
                    raise
                except Exception as error:
                    log.error("measuring failed", exc_info=error)
                    raise Refusal(500, "profile", f"measuring failed: {type(error).__name__}: {error}") from error
                tenant.profiled = (number, profile)
            return tenant.profiled[1]

    async def measure_link(self, tenant: Tenant, address: str, seconds: float) -> Speed:
        """Measure the link from here to a neighbour that the same run holds.

        Raises:
            Refusal: 404 if the run was released meanwhile, 502 if the neighbour refuses or cannot be reached.
            ValueError: If ``address`` is none.
        """
        async with tenant.measuring:
            link = self._make_probe(address, tenant.link_token)
            measuring = asyncio.ensure_future(self.blocking(link.measure, tenant.run, seconds))
            gone = asyncio.ensure_future(tenant.gone.wait())
            try:
                await asyncio.wait({measuring, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                link.close()
            try:
                return await measuring
            except PipelineError as error:
                self.of(tenant.run)
                raise Refusal(502, "link", str(error)) from error

    async def deliver(self, tenant: Tenant, packet: Packet) -> None:
        """Hand a packet to the stage; wait a little for room.

        Raises:
            QueueFull: If there is still no room.
            Exception: What :meth:`StageHost.deliver` raises.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            try:
                return await self.blocking(self.host(tenant).deliver, packet)
            except QueueFull as full:
                if loop.time() + full.retry_after > deadline:
                    raise
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(tenant.gone.wait(), full.retry_after)

    def host(self, tenant: Tenant) -> StageHost:
        """The tenant's stage.

        Raises:
            WrongTerm: If none is deployed.
        """
        if tenant.host is None:
            self.of(tenant.run)
            raise WrongTerm(f"no stage of run {tenant.run} is deployed on this worker")
        return tenant.host

    async def fetch(
        self, tenant: Tenant, direction: Direction, term: int, after: int, received: int, wait: float
    ) -> tuple[int, bytes] | None:
        """The frame after number ``after`` for the central node; None if there is none within ``wait`` seconds.

        Raises:
            WrongTerm: If ``term`` is not the deployed one, or no longer.
            Refusal: 400 if ``after`` or ``received`` was never handed out; see :meth:`Outbox.peek`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        self.host(tenant)
        outbox = tenant.outboxes[direction]
        arrived = asyncio.Event()

        def listen() -> None:
            # The loop may be closed already when the daemon stops.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.set)

        outbox.subscribe(listen)
        try:
            while True:
                if term != tenant.term or outbox.closed:
                    self.of(tenant.run)
                    raise WrongTerm(f"term {term} was asked for, term {tenant.term} is deployed")
                arrived.clear()
                try:
                    item = outbox.peek(after, received)
                except ValueError as error:
                    raise Refusal(400, "after", str(error)) from error
                remaining = deadline - loop.time()
                if item is not None or remaining <= 0:
                    return item
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(arrived.wait(), remaining)
        finally:
            outbox.unsubscribe(listen)

    async def wait_for_fault(self, tenant: Tenant, wait: float) -> Fault | None:
        """The stage's fault, or None if there is none within ``wait`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            self.of(tenant.run)
            fault = None if tenant.host is None else tenant.host.fault
            remaining = deadline - loop.time()
            if fault is not None or remaining <= 0:
                return fault
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(tenant.gone.wait(), min(remaining, _FAULT_INTERVAL))

    async def state(self, tenant: Tenant, wait: float) -> StageState:
        """The stage's state; see :meth:`StageHost.state`."""
        return await self.blocking(self.host(tenant).state, wait)

    async def stats(self, tenant: Tenant) -> dict[str, Any]:
        """The stage's figures; empty if none is deployed."""
        return {} if tenant.host is None else await self.blocking(tenant.host.stats)

    async def events(self, tenant: Tenant, term: int, after: int) -> dict[str, Any]:
        """What the stage did, by :meth:`StageHost.events`; this device's clock only where there is no stage."""
        host = tenant.host
        return no_events() if host is None else await self.blocking(host.events, term, after)
