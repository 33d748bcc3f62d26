"""A TCP proxy with the rate and delay of a slow link, for machines without root."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

_SLICE = 0.01
"""Seconds of sending time per piece, so that connections take turns."""
_CREDIT = 0.02
"""Seconds of sending time that may be made up for after the event loop was late."""
_BUFFER = 64 * 1024


class Lane:
    """One direction of the link, shared by all connections.

    Args:
        rate: Bits per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free = 0.0

    @property
    def piece(self) -> int:
        """Bytes that are read at once."""
        return _BUFFER if self.rate is None else max(512, min(_BUFFER, int(self.rate / 8 * _SLICE)))

    async def pass_through(self, nbytes: int) -> None:
        """Wait until so many bytes have been transmitted after all that came before them."""
        if self.rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now - _CREDIT) + 8 * nbytes / self.rate
        await asyncio.sleep(max(0.0, self._free - now))


class Proxy:
    """Listens on a port of 127.0.0.1 and passes everything on to ``target``, slowly; a context manager.

    Args:
        target: Host and port.
        sending: Bits per second from the target; None for no limit.
        receiving: Bits per second to the target.
        delay: Seconds in each direction.
        port: Port to listen on; 0 for a free one.
    """

    def __init__(
        self,
        target: tuple[str, int],
        sending: float | None = None,
        receiving: float | None = None,
        delay: float = 0.0,
        port: int = 0,
    ) -> None:
        self._target = target
        self._sending = Lane(sending)
        self._receiving = Lane(receiving)
        self._delay = delay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="slow link", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        # Small buffers: what waits must wait at the sender, as it would in front of a slow link.
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind(("127.0.0.1", port))
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections. Idempotent."""
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()
        self._socket.close()

    def set_rates(self, sending: float | None, receiving: float | None) -> None:
        """Change the rates, in bits per second, for what is not yet on its way."""
        self._sending.rate, self._receiving.rate = sending, receiving

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._socket, limit=_BUFFER)

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, and the other learns it from its closed connection
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_BUFFER)
        try:
            ways = [
                asyncio.ensure_future(self._carry(reader, far_writer, self._receiving)),
                asyncio.ensure_future(self._carry(far_reader, writer, self._sending)),
            ]
            try:
                await asyncio.gather(*ways)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            far_writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane) -> None:
        """Carry one direction of a connection until its sender closes it."""
        # Bytes in flight during the delay; few enough that a slow reader holds up the sender.
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)
        delivery = asyncio.ensure_future(self._deliver(held, writer))
        try:
            while piece := await reader.read(lane.piece):
                await lane.pass_through(len(piece))
                await held.put((self._loop.time() + self._delay, piece))
            await held.put((self._loop.time() + self._delay, b""))
            await delivery
        finally:
            delivery.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivery

    async def _deliver(self, held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, piece = await held.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if not piece:
                with suppress(OSError):
                    writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()
