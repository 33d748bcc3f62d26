from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

from edge import Proxy

Twice = Callable[[Callable[[], float], float, float], None]


class Peer:
    """A server that takes one connection, reads so many bytes, and sends so many back."""

    def __init__(self, reads: int, sends: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self.got = 0
        self._thread = threading.Thread(target=self._serve, args=(reads, sends))
        self._thread.start()

    def _serve(self, reads: int, sends: int) -> None:
        connection, _ = self._server.accept()
        with self._server, connection:
            while self.got < reads:
                self.got += len(connection.recv(65536))
            connection.sendall(bytes(sends))

    def join(self) -> None:
        self._thread.join(30)


def exchange(sending: float | None, receiving: float | None, delay: float, there: int, back: int) -> float:
    """Seconds from the first byte sent to the last one received."""
    peer = Peer(there, back)
    with Proxy(peer.address, sending, receiving, delay) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
            start = time.perf_counter()
            client.sendall(bytes(there))
            count = 0
            while count < back:
                count += len(client.recv(65536))
            seconds = time.perf_counter() - start
        peer.join()
    return seconds


def test_each_direction_has_its_own_rate(twice: Twice) -> None:
    twice(lambda: 8 * 200_000 / 2e6 / exchange(None, 2e6, 0, 200_000, 1), 0.9, 1.1)
    twice(lambda: 8 * 400_000 / 4e6 / exchange(4e6, 8e3, 0, 1, 400_000), 0.9, 1.1)


def test_a_delay_holds_in_both_directions(twice: Twice) -> None:
    twice(lambda: exchange(None, None, 0.03, 1, 1), 0.06, 0.09)


def test_connections_share_the_rate(twice: Twice) -> None:
    def seconds() -> float:
        with socket.create_server(("127.0.0.1", 0)) as server, Proxy(server.getsockname(), receiving=2e6) as proxy:
            clients = [socket.create_connection(("127.0.0.1", proxy.port), timeout=30) for _ in range(2)]
            threads = [threading.Thread(target=client.sendall, args=(bytes(100_000),)) for client in clients]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            left = {server.accept()[0]: 100_000 for _ in clients}
            while left:
                for end in select.select(list(left), [], [], 30)[0]:
                    left[end] -= len(end.recv(65536))
                    if not left[end]:
                        del left[end]
                        end.close()
            for thread, client in zip(threads, clients, strict=True):
                thread.join()
                client.close()
            return time.perf_counter() - start

    twice(lambda: 8 * 200_000 / 2e6 / seconds(), 0.9, 1.1)


def test_rates_change_while_running() -> None:
    peer = Peer(100_000, 1)
    with Proxy(peer.address, receiving=8_000) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
            proxy.set_rates(None, None)
            client.sendall(bytes(100_000))
            assert client.recv(1) == b"\0"
        peer.join()


def test_a_target_that_is_not_there_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with Proxy(address) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        assert client.recv(1) == b""


def test_closing_cuts_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(server.getsockname())
        with proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
            far, _ = server.accept()
            proxy.close()
            with far:
                assert client.recv(1) == b""
                assert far.recv(1) == b""
