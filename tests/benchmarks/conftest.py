"""Makes the testbed importable, and skips what needs root or its tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from edge import Testbed, why_not

RECEIVER = """
import socket, time
server = socket.create_server(("0.0.0.0", 9000))
print("listening", flush=True)
connection, _ = server.accept()
connection.recv(1)
start, count = time.perf_counter(), 0
while block := connection.recv(65536):
    count += len(block)
print("rate", 8 * count / (time.perf_counter() - start))
"""
SENDER = """
import socket, sys
socket.create_connection((sys.argv[1], 9000)).sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def _not_beside_others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests of what testbeds leave behind wait until no other process of this run has one, and the other way round."""
    try:
        import fcntl
    except ImportError:  # no Linux, no testbeds
        yield
        return
    alone = request.module.__name__.endswith("test_teardown")
    with (tmp_path_factory.getbasetemp().parent / "testbeds").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session")
def root() -> None:
    """Skips where network namespaces cannot be made."""
    problem = why_not()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture
def transfer() -> Callable[[Testbed, str, str, int], float]:
    """Sends so many bytes from one host to another; returns the bits per second of payload."""

    def measure(testbed: Testbed, source: str, target: str, nbytes: int) -> float:
        receiver = testbed.start(target, [sys.executable, "-S", "-c", RECEIVER])
        receiver.wait_for("^listening$", 30)
        testbed.run(source, [sys.executable, "-S", "-c", SENDER, testbed.address(target), str(nbytes)], timeout=60)
        return float(receiver.wait(30).stdout.split()[-1])

    return measure


@pytest.fixture
def twice() -> Callable[[Callable[[], float], float, float], None]:
    """Checks that a measured figure lies between two others, at the second try if a busy machine spoils the first."""

    def check(measure: Callable[[], float], least: float, most: float) -> None:
        figures = [measure()]
        if not least <= figures[0] <= most:
            figures.append(measure())
        assert least <= figures[-1] <= most, figures

    return check
