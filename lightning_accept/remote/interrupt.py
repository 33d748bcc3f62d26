"""HTTP sessions whose calls in progress can be ended from another thread."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection

from lightning_accept.remote.window import Window, limit_received

_BLOCK = 64 * 1024
"""Bytes per write. The socket's timeout holds for one write, so a slow link only has to manage this much in time."""
UNSENT = 16 * 1024
"""Bytes that may wait in this device's own queue, so that what was written has nearly all left."""


class Interrupter:
    """Knows the open sockets, and ends what waits on them."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`interrupt` was called."""
        return self._closed.is_set()

    def wait(self, seconds: float) -> bool:
        """Pause for ``seconds``; return at once with True when interrupted."""
        return self._closed.wait(seconds)

    def watch(self, connection: socket.socket) -> None:
        """Include ``connection``."""
        with self._lock:
            self._sockets.add(connection)
        if self.interrupted:
            _shut(connection)

    def interrupt(self) -> None:
        """End all calls in progress and to come. Idempotent."""
        self._closed.set()
        with self._lock:
            sockets = list(self._sockets)
        for connection in sockets:
            _shut(connection)


def _shut(connection: socket.socket) -> None:
    # Not through SSLSocket: its shutdown pulls the TLS object from under a thread that reads.
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def shorten_queue(connection: Any) -> None:
    """Let few bytes wait in the socket's own queue, where the system can do that."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS
    if option is not None:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT)


def new_session(interrupter: Interrupter, window: Window) -> requests.Session:
    """A session that ignores proxies, netrc and CA settings of the environment.

    Args:
        interrupter: Ends its calls.
        window: What replies may have under way.
    """
    session = requests.Session()
    session.trust_env = False
    session.headers["Accept-Encoding"] = "identity"
    adapter = _Adapter(interrupter, window)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


class _Adapter(HTTPAdapter):
    def __init__(self, interrupter: Interrupter, window: Window) -> None:
        self._interrupter = interrupter
        self._window = window
        self._reply_timeout: float | None = None
        super().__init__(pool_connections=1, pool_maxsize=4)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """Send with the timeout for the reply holding for every write as well, not that for connecting."""
        self._reply_timeout = timeout[1] if isinstance(timeout, tuple) else timeout
        return super().send(request, stream, timeout, verify, cert, proxies)

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **arguments: Any) -> None:
        adapter, interrupter, window = self, self._interrupter, self._window

        class Fitted:
            sock: Any

            def connect(self) -> None:
                super().connect()  # type: ignore[misc]
                shorten_queue(self.sock)
                interrupter.watch(self.sock)

            def putrequest(self, *arguments: Any, **options: Any) -> None:
                if self.sock is None:
                    self.connect()
                self.sock.settimeout(adapter._reply_timeout)
                limit_received(self.sock, window.nbytes)
                super().putrequest(*arguments, **options)  # type: ignore[misc]

        class Plain(Fitted, HTTPConnection):
            pass

        class Secure(Fitted, HTTPSConnection):
            pass

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        super().init_poolmanager(connections, maxsize, block, blocksize=_BLOCK, **arguments)
        manager: PoolManager = self.poolmanager
        manager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}


class Upload:
    """A request body that is written block by block.

    Args:
        body: The body.
        on_left: Called when all of it was handed to the network.
    """

    def __init__(self, body: bytes, on_left: Callable[[], None] | None = None) -> None:
        self._view = memoryview(body)
        self._position = 0
        self._on_left = on_left

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        """The next ``size`` bytes without copying them."""
        end = len(self._view) if size < 0 else self._position + size
        block = self._view[self._position : end]
        self._position += len(block)
        if not block and self._on_left is not None:
            self._on_left()  # the next block is asked for when the one before is written
        return block

    def __iter__(self) -> Upload:
        return self

    def __next__(self) -> memoryview:
        block = self.read(_BLOCK)
        if not block:
            raise StopIteration
        return block
