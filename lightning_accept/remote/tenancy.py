"""Who holds a worker: one run at a time, with a lease that the central node renews by asking for anything."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol, TypeVar

import torch

from lightning_accept.pipeline.messages import Deployment, Direction, Fault, Packet, QueueFull, StageState, WrongTerm
from lightning_accept.pipeline.transport import Channel, StageHost
from lightning_accept.remote.outbox import Outbox
from lightning_accept.remote.refusal import Refusal, failed

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


@dataclass(eq=False)
class Tenant:
    """The run that holds the worker."""

    run: str
    holder: str
    since: str
    heard: float
    requests: int = 0
    term: int | None = None
    link_token: str | None = None
    host: StageHost | None = None
    outboxes: dict[Direction, Outbox] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    deploying: asyncio.Lock = field(default_factory=asyncio.Lock)

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
        device: Where stages compute.
        lease: Seconds without a request of the central node after which a run is released.
        patience: Seconds for which a packet waits here for room before its sender is told to try again. A refused
            packet travels twice, which slow links cannot afford.
        clock: Seconds, for the lease.
    """

    def __init__(
        self,
        make_stage: StageFactory,
        make_channel: Callable[[str, str], Channel],
        *,
        device: torch.device,
        lease: float = 60.0,
        patience: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = lease
        self.tenant: Tenant | None = None
        self._make_stage = make_stage
        self._make_channel = make_channel
        self._device = device
        self._patience = patience
        self._clock = clock
        self._executor = ThreadPoolExecutor(16, thread_name_prefix="worker request")
        self._last_release = ""

    async def blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what blocks or computes outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(function, *arguments))

    async def claim(self, run: str, holder: str) -> None:
        """Take the worker for ``run``, described to others as ``holder``.

        Raises:
            Refusal: 409 if another run holds it.
        """
        if not _RUN.fullmatch(run) or not 0 < len(holder) <= 200 or not holder.isprintable():
            raise Refusal(400, "claim", "a claim names its run (letters, digits, '._-') and a printable holder")
        await self.expire()
        tenant = self.tenant
        if tenant is None:
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self.tenant = Tenant(run, holder, since, self._clock())
            log.info("claimed by %s for run %s", holder, run)
        elif (tenant.run, tenant.holder) == (run, holder):
            tenant.heard = self._clock()
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
            await self.blocking(tenant.close)

    async def deploy(self, tenant: Tenant, deployment: Deployment, where: str) -> None:
        """Put a stage here in place of the one of an earlier term. A repetition changes nothing.

        Raises:
            Refusal: 400 if the stage cannot be built from the deployment, 404 if the run was released meanwhile, 500
                with a fault for any other failure.
            WrongTerm: If run or term are older than what is deployed.
        """
        if deployment.run != tenant.run:
            raise WrongTerm(f"the deployment is of run {deployment.run}, this worker is held by run {tenant.run}")
        async with tenant.deploying:
            if tenant.term is not None and deployment.term <= tenant.term:
                if deployment.term == tenant.term and tenant.host is not None:
                    return
                raise WrongTerm(f"term {deployment.term} was to be deployed after term {tenant.term}")
            await self.blocking(tenant.close)
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
            if tenant.gone.is_set():
                await self.blocking(tenant.close)
                self.of(tenant.run)
            log.info("stage %d of %d deployed, term %d", deployment.stage, deployment.stages, deployment.term)

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
        self, tenant: Tenant, direction: Direction, term: int, after: int, wait: float
    ) -> tuple[int, bytes] | None:
        """The frame after number ``after`` for the central node; None if there is none within ``wait`` seconds.

        Raises:
            WrongTerm: If ``term`` is not the deployed one, or no longer.
            Refusal: 400 if ``after`` was never handed out.
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
                    item = outbox.peek(after)
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
