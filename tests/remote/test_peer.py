"""Requests to a worker, as its sockets see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from lightning_accept.remote.interrupt import Interrupter
from lightning_accept.remote.peer import Peer
from lightning_accept.remote.tokens import new_token


class Taker(BaseHTTPRequestHandler):
    """Takes everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Taker) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(30)


class Watching(Interrupter):
    """Keeps the sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets: list[Any] = []

    def watch(self, connection: Any) -> None:
        self.sockets.append(connection)
        super().watch(connection)


def test_every_write_has_as_long_as_the_reply_on_a_new_connection_too(url: str) -> None:
    """Once the first request had the 5 s of connecting for each write.

    A block of 256 KiB does not pass 0.25 Mbit/s in that time, nor in the next attempt, on the next new connection.
    """
    interrupter, seen = Watching(), []
    peer = Peer(url, new_token(), timeout=60.0, cafile=None, interrupter=interrupter)

    def left() -> None:
        seen.append([connection.gettimeout() for connection in interrupter.sockets])

    for wait in (0.0, 7.0):
        peer.request("POST", "/packets", "a packet", body=bytes(1000), wait=wait, on_left=left)
    peer.close()
    assert seen == [[30.0], [37.0]]
