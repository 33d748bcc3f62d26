"""Reading a request's body: nothing before its length is known and allowed, and never longer than a deadline."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from aiohttp import web

from lightning_accept.remote.frames import new_buffer
from lightning_accept.remote.inflow import Inflow
from lightning_accept.remote.refusal import Refusal

SLOWEST_RATE = 16 * 1024
"""Bytes per second below which a sender is not waited for."""


async def read_body(request: web.Request, limit: int, patience: float, inflow: Inflow | None = None) -> memoryview:
    """The body of ``request`` in a buffer of its own.

    Args:
        request: The request, of which nothing but the head has been read.
        limit: Largest length in bytes.
        patience: Seconds without a byte after which the sender is given up.
        inflow: Told of what comes in.

    Raises:
        Refusal: 411 without a declared length, 413 above ``limit``, 408 past the deadline.
    """
    size = _declared(request, limit)
    buffer = new_buffer(size)

    def keep(position: int, chunk: bytes) -> None:
        if inflow is not None:
            inflow.arrived(len(chunk))
        buffer[position : position + len(chunk)] = chunk

    if inflow is None:
        await _receive(request, size, patience, keep)
        return buffer
    inflow.begin()
    try:
        await _receive(request, size, patience, keep)
    finally:
        inflow.end()
    return buffer


async def drop_body(request: web.Request, limit: int, patience: float) -> None:
    """As :func:`read_body`, but keep nothing."""
    await _receive(request, _declared(request, limit), patience, lambda position, chunk: None)


def _declared(request: web.Request, limit: int) -> int:
    size = request.content_length
    if size is None:
        raise Refusal(411, "length", "the request must declare its Content-Length")
    if size > limit:
        raise Refusal(
            413,
            "size",
            f"a body of {size} bytes exceeds the limit of {limit} bytes; start the worker with a larger --max-body",
        )
    return size


async def _receive(request: web.Request, size: int, patience: float, take: Callable[[int, bytes], None]) -> None:
    filled = 0
    loop = asyncio.get_running_loop()
    progress = loop.time()
    deadline = progress + patience + size / SLOWEST_RATE

    task = asyncio.current_task()
    assert task is not None
    late = False
    timer: asyncio.TimerHandle

    def watch() -> None:
        nonlocal timer, late
        due = min(progress + patience, deadline)
        if loop.time() < due:
            timer = loop.call_at(due, watch)
        else:
            late = True
            task.cancel()

    # One timer for the whole body: waiting for every chunk with a timeout of its own costs more than the copying.
    timer = loop.call_later(patience, watch)
    try:
        while filled < size:
            chunk, _ = await request.content.readchunk()
            if not chunk:
                raise Refusal(400, "frame", f"the body ended after {filled} of {size} bytes")
            take(filled, chunk[: size - filled])
            filled += len(chunk)
            progress = loop.time()
    except asyncio.CancelledError:
        if not late:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise Refusal(408, "slow", f"only {filled} of {size} bytes of the body arrived in time") from None
    finally:
        timer.cancel()
