"""Window: little more under way than keeps a slow link busy, and no limit on a fast one."""

from __future__ import annotations

import socket

from lightning_accept.remote import window
from lightning_accept.remote.window import LEAST, Window

SLOW = 100_000.0
"""Bytes per second, 0.8 Mbit/s."""


class Connection:
    """Remembers what was set."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        (self.sent if option == socket.SO_SNDBUF else self.received).append(value)


def learnt(*rates: float, round_trip: float = 0.1) -> Window:
    found = Window()
    for rate in rates:
        found.sent(round(2 * rate), 2.0, round_trip)
        found.received(round(rate), 1.0)
    return found


def test_half_more_than_the_bandwidth_over_a_round_trip_and_a_little_more() -> None:
    found = learnt(1e6)
    assert found.nbytes("there") == found.nbytes("back") == 225_000


def test_nothing_is_limited_while_nothing_is_known() -> None:
    connection, found = Connection(), Window()
    found.sent(100, 1.0, 0.1)  # too short a message to tell anything
    found.received(window._SMALLEST_MESSAGE, 0.0)
    found.fit(connection)
    assert found.nbytes("there") is None and found.nbytes("back") is None
    assert connection.sent == connection.received == []


def test_a_slow_link_is_limited_once() -> None:
    connection, found = Connection(), learnt(SLOW)
    found.fit(connection)
    found.fit(connection)
    assert connection.sent == [22_500]
    assert connection.received in ([22_500], [])  # only Linux can do that


def test_a_fast_link_is_left_alone() -> None:
    connection, found = Connection(), learnt(1e8)
    found.fit(connection)
    assert connection.sent == connection.received == []


def test_the_shortest_round_trip_counts() -> None:
    """Others have waited behind what the link carries."""
    found = learnt(1e6)
    found.sent(10**6, 1.0, 2.0)
    assert found.nbytes("there") == 225_000


def test_a_link_that_gets_faster_is_given_more() -> None:
    connection, found = Connection(), learnt(SLOW)
    found.fit(connection)
    for rate in (4 * SLOW, 1e8):
        found.sent(round(rate), 1.0, 0.1)
        found.fit(connection)
    assert connection.sent == [22_500, 90_000, 22_500_000]


def test_a_link_that_gets_slower_is_given_less_once_all_that_counts_was_slow() -> None:
    found = learnt(10 * SLOW)
    for _ in range(window._KEPT):
        assert found.nbytes("there") == 225_000
        found.sent(round(SLOW), 1.0, 0.1)
    assert found.nbytes("there") == 22_500


def test_too_low_a_bandwidth_mends_itself() -> None:
    """What the window lets through in a round trip is at least half more than what was believed."""
    found, round_trip, real = learnt(5000.0, round_trip=1.0), 1.0, 1e6
    for _ in range(20):
        allowed = found.nbytes("there")
        assert allowed is not None and allowed >= LEAST
        rate = min(real, allowed / round_trip)
        found.sent(round(100 * rate), 100.0, round_trip)
    assert rate == real


def test_the_system_takes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        learnt(SLOW).fit(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (22_500, 45_000)  # Linux doubles it
        if hasattr(socket, "TCP_WINDOW_CLAMP"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP) == 22_500


def test_what_a_connection_refuses_is_left() -> None:
    connection = socket.socket()
    connection.close()
    learnt(SLOW).fit(connection)
