"""Rates and delays of emulated links. Measured times are what these tests are about, so their bounds are wide."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from edge import Host, Testbed

pytestmark = pytest.mark.usefixtures("root")
Transfer = Callable[[Testbed, str, str, int], float]
Twice = Callable[[Callable[[], float], float, float], None]

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 9001))
print("listening", flush=True)
while True:
    server.sendto(*server.recvfrom(100))
"""
PING = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(10)
times = []
for _ in range(8):
    start = time.perf_counter()
    client.sendto(b"?", (sys.argv[1], 9001))
    client.recv(100)
    times.append(time.perf_counter() - start)
print(min(times))
"""


@pytest.fixture(scope="module")
def testbed(root: None) -> Iterator[Testbed]:
    hosts = [Host("central"), Host("pi-1", rate=("4mbit", "1mbit")), Host("far", rate="2mbit", delay=0.03)]
    with Testbed(hosts) as testbed:
        yield testbed


def test_each_direction_has_its_own_rate(testbed: Testbed, transfer: Transfer, twice: Twice) -> None:
    """Payload is nominally 96 % of the rate; the rest is framing."""
    twice(lambda: transfer(testbed, "pi-1", "central", 700_000) / 4e6, 0.9, 1.05)
    twice(lambda: transfer(testbed, "central", "pi-1", 200_000) / 1e6, 0.9, 1.05)


def test_the_slower_end_counts_and_a_delayed_link_keeps_its_rate(
    testbed: Testbed, transfer: Transfer, twice: Twice
) -> None:
    twice(lambda: transfer(testbed, "pi-1", "far", 400_000) / 2e6, 0.9, 1.05)


def test_rates_change_while_running(testbed: Testbed, transfer: Transfer, twice: Twice) -> None:
    testbed.set_rate("pi-1", ("8mbit", None))
    twice(lambda: transfer(testbed, "pi-1", "central", 1_000_000) / 8e6, 0.9, 1.05)
    testbed.set_rate("pi-1", (None, "4mbit"))
    twice(lambda: transfer(testbed, "central", "pi-1", 500_000) / 4e6, 0.9, 1.05)


def test_a_delay_holds_in_both_directions(testbed: Testbed, twice: Twice) -> None:
    server = testbed.start("far", [sys.executable, "-S", "-c", ECHO])
    server.wait_for("^listening$", 30)
    ping = [sys.executable, "-S", "-c", PING, testbed.address("far")]
    twice(lambda: float(testbed.run("central", ping, timeout=60).stdout), 0.06, 0.08)
    server.end(0)
