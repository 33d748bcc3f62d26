"""The worker's HTTP interface: who may ask for what, and how it is answered."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web

from lightning_accept.pipeline.messages import (
    Direction,
    PipelineError,
    QueueFull,
    SourceUnreachable,
    StageFault,
    WrongTerm,
)
from lightning_accept.remote.body import drop_body, read_body
from lightning_accept.remote.facts import facts
from lightning_accept.remote.frames import load_json
from lightning_accept.remote.handover import read_request
from lightning_accept.remote.interrupt import UNSENT, shorten_queue
from lightning_accept.remote.probe import LARGEST_PROBE, LONGEST_PROBE, filler
from lightning_accept.remote.refusal import Refusal, failed
from lightning_accept.remote.tenancy import Tenancy, Tenant
from lightning_accept.remote.tokens import bears
from lightning_accept.remote.window import LEAST, MOST, limit_received
from lightning_accept.remote.wire import (
    FRAME_TYPE,
    ITEM_HEADER,
    PASSED_HEADER,
    WireError,
    fault_to_json,
    pack_state,
    speed_to_json,
    unpack_deployment,
    unpack_packet,
    unpack_profile_request,
)
from lightning_accept.version import __version__

log = logging.getLogger("lightning_accept.worker")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_WAIT = 60.0
"""Seconds for which one request may wait."""

_LINK_PATHS = ("/runs/{run}/packets", "/runs/{run}/handover", "/runs/{run}/probe")
"""What other workers of the run may ask for, with its link token."""
_MAX_STATE_WAIT = 3600.0
_MAX_PROFILE_WAIT = 24 * 3600.0
_NUMBER = re.compile("[0-9a-f]{1,64}")
_MAX_JSON = 64 * 1024
_MAX_NAMES = 8 * 2**20
_SLICE = 256 * 1024


@dataclass(frozen=True)
class Service:
    """What the routes need.

    Attributes:
        tenancy: The run that holds the worker.
        token: The worker's bearer token.
        device: Where stages compute.
        threads: Threads that a stage computes with.
        max_body: Largest request body in bytes.
        body_patience: Seconds without a byte after which a request body is given up.
    """

    tenancy: Tenancy
    token: str
    device: torch.device
    threads: int
    max_body: int
    body_patience: float

    def application(self) -> web.Application:
        """The aiohttp application."""
        application = web.Application(middlewares=[self._answer], client_max_size=self.max_body)
        application.add_routes(
            [
                web.get("/healthz", self._healthz, allow_head=False),
                web.get("/status", self._status, allow_head=False),
                web.post("/runs", self._claim),
                web.delete("/runs/{run}", self._release),
                web.post("/runs/{run}/deploy", self._deploy),
                web.post("/runs/{run}/packets", self._packets),
                web.post("/runs/{run}/profile", self._profile),
                web.post("/runs/{run}/measure-link", self._measure_link),
                web.post("/runs/{run}/probe", self._take_probe),
                web.get("/runs/{run}/probe", self._send_probe, allow_head=False),
                web.get("/runs/{run}/outbox/{direction:down|up}", self._outbox, allow_head=False),
                web.post("/runs/{run}/handover", self._handover),
                web.post("/runs/{run}/forget", self._forget),
                web.get("/runs/{run}/state", self._state, allow_head=False),
                web.get("/runs/{run}/poll", self._poll, allow_head=False),
                web.get("/runs/{run}/stats", self._stats, allow_head=False),
                web.get("/runs/{run}/events", self._events, allow_head=False),
            ]
        )
        return application

    @property
    def _answer(self) -> Any:
        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await self._authorised(request, handler)
            except Exception as error:
                return _refusal_of(error, request).response()

        return answer

    async def _authorised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        missing = request.match_info.http_exception
        if missing is not None:
            allow = missing.headers.get("Allow")
            raise Refusal(missing.status, "path", missing.reason, headers={"Allow": allow} if allow else None)
        path = request.match_info.route.resource.canonical if request.match_info.route.resource else ""
        if path == "/healthz":
            return await handler(request)
        tenant = self.tenancy.tenant
        mine = tenant is not None and request.match_info.get("run") == tenant.run
        header = request.headers.get("Authorization")
        if not bears(header, self.token):
            link_token = tenant.link_token if tenant is not None and mine and path in _LINK_PATHS else None
            if link_token is None or not bears(header, link_token):
                raise _unauthorised(header)
            return await handler(request)
        if tenant is None or not mine:
            return await handler(request)
        with self.tenancy.hearing(tenant):
            return await handler(request)

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "version": __version__})

    async def _facts(self) -> dict[str, Any]:
        known = await self.tenancy.blocking(facts, self.device, self.threads)
        return {**known, "lease": self.tenancy.lease, "max_body": self.max_body}

    async def _status(self, request: web.Request) -> web.StreamResponse:
        await self.tenancy.expire()
        tenant = self.tenancy.tenant
        holder = None
        if tenant is not None:
            holder = {"run": tenant.run, "holder": tenant.holder, "since": tenant.since, "term": tenant.term}
        stats = None if tenant is None else await self.tenancy.stats(tenant)
        return web.json_response({"facts": await self._facts(), "holder": holder, "stats": stats})

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, min(_MAX_JSON, self.max_body), self.body_patience)
        claim = load_json(bytes(body), "claim")
        names = ("run", "holder", "link_token")
        if not isinstance(claim, dict) or not all(isinstance(claim.get(name), str) for name in names):
            raise WireError("a claim is a JSON object with the texts 'run', 'holder' and 'link_token'")
        await self.tenancy.claim(*(claim[name] for name in names))
        return web.json_response(await self._facts())

    async def _release(self, request: web.Request) -> web.StreamResponse:
        await self.tenancy.release(request.match_info["run"])
        return web.Response(status=204)

    async def _deploy(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        body = await read_body(request, self.max_body, self.body_patience)
        deployment = await self.tenancy.blocking(unpack_deployment, body)
        fetched = await self.tenancy.deploy(tenant, deployment, f"{request.scheme}://{request.host}")
        return web.json_response({"term": deployment.term, "fetched": fetched})

    async def _handover(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        body = await read_body(request, min(_MAX_NAMES, self.max_body), self.body_patience)
        term, names = read_request(bytes(body))
        state = await self.tenancy.handover(tenant, term, names, _wait(request, MAX_WAIT))
        return await _send_frame(request, await self.tenancy.blocking(pack_state, state), {})

    async def _forget(self, request: web.Request) -> web.StreamResponse:
        await self.tenancy.forget(self._tenant(request), _whole(request, "term"))
        return web.Response(status=204)

    async def _packets(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        if "window" in request.query and request.transport is not None:
            wanted = min(MOST, max(LEAST, _whole(request, "window")))
            limit_received(request.transport.get_extra_info("socket"), wanted)
        inflow = tenant.inflow(request.remote or "")
        body = await read_body(request, self.max_body, self.body_patience, inflow)
        nbytes, seconds = inflow.take()
        packet = await self.tenancy.blocking(unpack_packet, body)
        await self.tenancy.deliver(tenant, packet)
        return web.json_response({}, headers={PASSED_HEADER: f"{nbytes} {seconds:.6f}"})

    async def _profile(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        number, wait = request.query.get("number", ""), _wait(request, _MAX_PROFILE_WAIT)
        if not _NUMBER.fullmatch(number):
            raise Refusal(400, "query", "the query must hold number=, hexadecimal digits")
        body = await read_body(request, self.max_body, self.body_patience)
        wanted = await self.tenancy.blocking(unpack_profile_request, body)
        profile = await self.tenancy.profile(tenant, wanted, number, wait)
        return web.json_response(profile.to_json())

    async def _measure_link(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        body = await read_body(request, min(_MAX_JSON, self.max_body), self.body_patience)
        order = load_json(bytes(body), "order to measure a link")
        if not isinstance(order, dict) or not isinstance(order.get("address"), str):
            raise WireError("an order to measure a link is a JSON object with the text 'address'")
        seconds = order.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= LONGEST_PROBE:
            raise WireError(f"'seconds' must be a number up to {LONGEST_PROBE:g}")
        return web.json_response(speed_to_json(await self.tenancy.measure_link(tenant, order["address"], seconds)))

    async def _take_probe(self, request: web.Request) -> web.StreamResponse:
        self._tenant(request)
        await drop_body(request, LARGEST_PROBE, self.body_patience)
        return web.json_response({})

    async def _send_probe(self, request: web.Request) -> web.StreamResponse:
        self._tenant(request)
        size = _whole(request, "bytes")
        if size > LARGEST_PROBE:
            raise Refusal(400, "query", f"bytes= may be up to {LARGEST_PROBE}")
        return await _send_frame(request, filler(size), {})

    async def _outbox(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        direction: Direction = "down" if request.match_info["direction"] == "down" else "up"
        term, after, received = (_whole(request, name) for name in ("term", "after", "received"))
        item = await self.tenancy.fetch(tenant, direction, term, after, received, _wait(request, MAX_WAIT))
        if item is None:
            return web.Response(status=204)
        number, frame = item
        async with tenant.writing[direction]:
            return await _send_frame(request, frame, {ITEM_HEADER: str(number)})

    async def _state(self, request: web.Request) -> web.StreamResponse:
        state = await self.tenancy.state(self._tenant(request), _wait(request, _MAX_STATE_WAIT))
        return await _send_frame(request, await self.tenancy.blocking(pack_state, state), {})

    async def _poll(self, request: web.Request) -> web.StreamResponse:
        fault = await self.tenancy.wait_for_fault(self._tenant(request), _wait(request, MAX_WAIT))
        return web.json_response({"fault": None if fault is None else fault_to_json(fault)})

    async def _stats(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self.tenancy.stats(self._tenant(request)))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        tenant, term, after = self._tenant(request), _whole(request, "term"), _whole(request, "after")
        return web.json_response(await self.tenancy.events(tenant, term, after), dumps=_compact)

    def _tenant(self, request: web.Request) -> Tenant:
        return self.tenancy.of(request.match_info["run"])


_compact = functools.partial(json.dumps, separators=(",", ":"))
"""Events are many, and the links are slow."""


def _unauthorised(header: str | None) -> Refusal:
    message = "a bearer token is required" if header is None else "the bearer token is wrong"
    return Refusal(401, "token", message, headers={"WWW-Authenticate": "Bearer"})


async def _send_frame(request: web.Request, frame: bytes, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": FRAME_TYPE, **headers})
    response.content_length = len(frame)
    _shorten(request)
    await response.prepare(request)
    view = memoryview(frame)
    # In slices, so that the socket's buffer never holds a second copy of the whole.
    for start in range(0, len(view), _SLICE):
        await response.write(view[start : start + _SLICE])
    await response.write_eof()
    return response


def _shorten(request: web.Request) -> None:
    """Let little wait in this device's own queues, so that what was written has nearly all left."""
    transport = request.transport
    if transport is not None:
        transport.set_write_buffer_limits(high=UNSENT)
        shorten_queue(transport.get_extra_info("socket"))


def _whole(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Refusal(400, "query", f"the query must hold {name}=, a whole number")
    return int(text)


def _wait(request: web.Request, longest: float) -> float:
    try:
        wait = float(request.query.get("wait", "0"))
    except ValueError:
        wait = math.nan
    if not 0 <= wait < math.inf:
        raise Refusal(400, "query", "wait= must be a number of seconds")
    return min(wait, longest)


def _refusal_of(error: Exception, request: web.Request) -> Refusal:
    """The reply to a request that failed with ``error``."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, (web.HTTPException, ConnectionError)):
        raise error
    if isinstance(error, StageFault):
        return failed(error.fault)
    if isinstance(error, WrongTerm):
        return Refusal(409, "term", str(error))
    if isinstance(error, SourceUnreachable):
        return Refusal(502, "source", str(error), source=error.address)
    if isinstance(error, PipelineError):
        return Refusal(502, "pipeline", str(error))
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
        return Refusal(503, "full", str(error), headers=headers, retry_after=error.retry_after)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return Refusal(504, "timeout", str(error) or "the stage did not answer in time")
    if isinstance(error, ValueError):
        return Refusal(400, "frame", str(error))
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return Refusal(500, "internal", f"{type(error).__name__} in the worker; its log tells more")
