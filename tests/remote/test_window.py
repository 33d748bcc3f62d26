"""Window: little more under way than keeps a link busy."""

from __future__ import annotations

import socket

import pytest

from lightning_accept.remote import window
from lightning_accept.remote.window import LEAST, MOST, Window, limit_received

SLOW = 100_000.0
"""Bytes per second, 0.8 Mbit/s."""

only_linux = pytest.mark.skipif(not hasattr(socket, "TCP_WINDOW_CLAMP"), reason="only Linux limits windows")


def learnt(*rates: float, round_trip: float = 0.1) -> Window:
    found = Window()
    for rate in rates:
        found.passed(round(2 * rate), 2.0, round_trip)
    return found


def test_half_more_than_the_bandwidth_over_a_round_trip_and_a_little_longer() -> None:
    assert learnt(1e6).nbytes == 225_000


def test_nothing_is_limited_while_bandwidth_or_round_trip_are_unknown() -> None:
    found = Window()
    found.passed(100, 1.0, 0.1)  # too short a message to tell anything
    found.passed(window.SMALLEST_BYTES, 0.0)
    assert found.nbytes is None
    found = Window()
    found.passed(10**6, 1.0)
    assert found.nbytes is None
    found.passed(0, 0.0, 0.1)
    assert found.nbytes == 225_000


def test_the_shortest_round_trip_counts() -> None:
    """Others have waited behind what the link carries."""
    found = learnt(1e6)
    found.passed(10**6, 1.0, 2.0)
    assert found.nbytes == 225_000


def test_a_link_that_gets_faster_is_given_more_at_once() -> None:
    assert learnt(SLOW, 4 * SLOW).nbytes == 90_000


def test_a_link_that_gets_slower_is_given_less_once_all_that_counts_was_slow() -> None:
    found = learnt(10 * SLOW)
    for _ in range(window._KEPT):
        assert found.nbytes == 225_000
        found.passed(round(SLOW), 1.0, 0.1)
    assert found.nbytes == 22_500


@pytest.mark.parametrize(("rate", "expected"), [(4096.0, LEAST), (1e12, MOST)])
def test_never_too_little_nor_without_end(rate: float, expected: int) -> None:
    assert learnt(rate).nbytes == expected


def test_too_low_a_bandwidth_mends_itself() -> None:
    """What the window lets through in a round trip is at least half more than what was believed."""
    found, round_trip, real = learnt(5000.0, round_trip=1.0), 1.0, 1e6
    for _ in range(20):
        allowed = found.nbytes
        assert allowed is not None and allowed >= LEAST
        rate = min(real, allowed / round_trip)
        found.passed(round(100 * rate), 100.0, round_trip)
    assert rate == real


def clamp(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)


@only_linux
def test_a_connection_is_limited_and_given_more_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        before = clamp(connection)
        limit_received(connection, None)
        assert clamp(connection) == before
        for nbytes in (22_500, 10**6):
            limit_received(connection, nbytes)
            assert clamp(connection) == nbytes


def test_a_closed_connection_is_left() -> None:
    connection = socket.socket()
    connection.close()
    limit_received(connection, 22_500)
