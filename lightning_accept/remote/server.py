"""The daemon's event loop: listening, the lease's timer, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from aiohttp import web

from lightning_accept.pipeline.transport import Channel
from lightning_accept.remote.client import HttpChannel
from lightning_accept.remote.handover import HttpSource, Source
from lightning_accept.remote.http_probe import LinkProbe
from lightning_accept.remote.routes import Service
from lightning_accept.remote.tenancy import StageFactory, Tenancy


class CannotListen(OSError):
    """The address cannot be listened on; the message says what to change."""


@dataclass(frozen=True)
class ServerOptions:
    """How a worker serves.

    Attributes:
        token: The bearer token.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        device: Where stages compute.
        threads: Threads that a stage computes with.
        max_body: Largest request body in bytes.
        lease: Seconds without a request of the central node after which a run is released.
        body_patience: Seconds without a byte after which a request body is given up.
        queue_patience: Seconds for which a packet waits here for room before its sender is told to try again.
        link_timeout: Seconds after which a neighbour that cannot be reached is given up.
        tls: Serve HTTPS with this context.
        cafile: Certificates against which neighbours' are checked; None for the system's.
        clock: Seconds, for the lease.
    """

    token: str
    host: str = "127.0.0.1"
    port: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int = 1
    max_body: int = 2 * 2**30
    lease: float = 60.0
    body_patience: float = 30.0
    queue_patience: float = 5.0
    link_timeout: float = 60.0
    tls: ssl.SSLContext | None = None
    cafile: str | None = None
    clock: Callable[[], float] = time.monotonic


async def serve(
    options: ServerOptions,
    make_stage: StageFactory,
    *,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
    tidy: Callable[[], None] = lambda: None,
) -> None:
    """Serve until ``stop`` is set; then finish the replies under way and release the run.

    Args:
        options: How to serve.
        make_stage: Builds stages.
        on_listening: Called once with the port.
        stop: Ends the daemon.
        tidy: Called after a stage was built or dropped.

    Raises:
        CannotListen: If the address is in use or not allowed.
    """

    def make_channel(address: str, link_token: str) -> Channel:
        return HttpChannel(address, link_token, timeout=options.link_timeout, cafile=options.cafile)

    def make_probe(address: str, link_token: str) -> LinkProbe:
        return LinkProbe(address, link_token, timeout=options.link_timeout, cafile=options.cafile)

    def make_source(address: str, link_token: str) -> Source:
        return HttpSource(address, link_token, timeout=options.link_timeout, cafile=options.cafile)

    tenancy = Tenancy(
        make_stage,
        make_channel,
        make_source,
        make_probe,
        device=options.device,
        lease=options.lease,
        patience=options.queue_patience,
        clock=options.clock,
        tidy=tidy,
    )
    service = Service(tenancy, options.token, options.device, options.threads, options.max_body, options.body_patience)
    runner = web.AppRunner(
        service.application(), access_log=None, shutdown_timeout=3.0, read_bufsize=2**20, keepalive_timeout=300.0
    )
    await runner.setup()
    timer: asyncio.Task[None] | None = None
    try:
        site = web.TCPSite(runner, options.host, options.port, ssl_context=options.tls)
        try:
            await site.start()
        except OSError as error:
            raise CannotListen(_advice(error, options.host, options.port)) from error
        timer = asyncio.create_task(_watch_lease(tenancy))
        on_listening(int(runner.addresses[0][1]))
        await stop.wait()
        await site.stop()
    finally:
        if timer is not None:
            timer.cancel()
            with suppress(asyncio.CancelledError):
                await timer
        # First the run, so that requests that wait for its stage are answered.
        await tenancy.close()
        await runner.cleanup()
        tenancy.end()


async def _watch_lease(tenancy: Tenancy) -> None:
    while True:
        await asyncio.sleep(min(1.0, tenancy.lease / 4))
        await tenancy.expire()


def _advice(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use, perhaps by another worker;"
            " choose another with --port, or a free one with --port 0"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} may not be used by this user; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}; choose another address with --host"
