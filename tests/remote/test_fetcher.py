"""Fetcher: the next item is asked for while one comes in, and every item is handed out for what it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_accept.pipeline.messages import Transfer, TransportError
from lightning_accept.remote.fetcher import Fetcher
from lightning_accept.remote.peer import Reply
from lightning_accept.remote.window import Window

Asked = tuple[int, int, int]
"""Term, after and received."""


class Worker:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self.answers: dict[int, queue.SimpleQueue[tuple[int, int | None] | Exception]] = {}
        self.bodies: dict[int, threading.Event] = {}
        self.lock = threading.Lock()

    def of(self, after: int) -> tuple[queue.SimpleQueue[Any], threading.Event]:
        with self.lock:
            return (
                self.answers.setdefault(after, queue.SimpleQueue()),
                self.bodies.setdefault(after, threading.Event()),
            )

    def answer(self, after: int, status: int = 200, length: int | None = 10, complete: bool = True) -> None:
        """Send the head of an answer, and its body too, or later."""
        answers, body = self.of(after)
        answers.put((status, length))
        if complete:
            body.set()


class FakePeer:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def request(self, method: str, path: str, what: str, *, query: Any, wait: float, on_head: Any) -> Reply:
        after = int(query["after"])
        assert (method, path) == ("GET", "/runs/run-1/outbox/down")
        self.worker.asked.put((int(query["term"]), after, int(query["received"])))
        answers, body = self.worker.of(after)
        answer = answers.get(timeout=30)
        if isinstance(answer, Exception):
            raise answer
        on_head(*answer)
        assert body.wait(30)
        return Reply(answer[0], {"number": str(after + 1)}, memoryview(b""), 0.0, Transfer(0, 0.0))

    def close(self) -> None:
        pass


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def fetch(worker: Worker) -> Iterator[Callable[..., Any]]:
    """Fetches in a thread of its own; returns what waits for the outcome."""
    fetcher = Fetcher(lambda: FakePeer(worker), "down", Window())  # type: ignore[arg-type, return-value]
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(after: int, term: int = 1) -> Callable[[], Any]:
        def run() -> None:
            try:
                outcomes.put(fetcher.fetch("run-1", term, after, 5.0))
            except Exception as error:
                outcomes.put(error)

        threading.Thread(target=run, daemon=True).start()
        return lambda: outcomes.get(timeout=30)

    yield start
    fetcher.close()


def test_the_next_is_asked_for_while_one_comes_in(worker: Worker, fetch: Any) -> None:
    first = fetch(0)
    assert worker.asked.get(timeout=30) == (1, 0, 0)
    worker.answer(0, complete=False)
    assert worker.asked.get(timeout=30) == (1, 1, 0)  # the first item is not there yet, so none was received
    worker.of(0)[1].set()
    assert first().headers["number"] == "1"
    second = fetch(1)
    worker.answer(1, status=204, length=0)
    assert second().status == 204
    again = fetch(1)
    assert worker.asked.get(timeout=30) == (1, 1, 1)
    worker.answer(1)
    assert again().headers["number"] == "2"


def test_many_in_a_row(worker: Worker, fetch: Any) -> None:
    for after in range(50):
        worker.answer(after)
        assert fetch(after)().headers["number"] == str(after + 1)
    asked = [worker.asked.get(timeout=30)[1] for _ in range(50)]
    assert asked == list(range(50))  # each once


@pytest.mark.parametrize("length", [None, 2**30])
def test_nothing_is_asked_for_beside_a_large_item(worker: Worker, fetch: Any, length: int | None) -> None:
    worker.answer(0, length=length)
    assert fetch(0)().status == 200
    assert worker.asked.get(timeout=30) == (1, 0, 0)
    worker.answer(1)
    assert fetch(1)().status == 200
    assert worker.asked.get(timeout=30) == (1, 1, 1)


def test_an_error_is_that_of_its_item(worker: Worker, fetch: Any) -> None:
    worker.answer(0)
    worker.of(1)[0].put(TransportError("gone"))
    assert fetch(0)().status == 200
    error = fetch(1)()
    assert isinstance(error, TransportError)


def test_what_was_asked_for_in_another_term_is_not_handed_out(worker: Worker, fetch: Any) -> None:
    worker.answer(0)
    assert fetch(0)().status == 200
    assert [worker.asked.get(timeout=30) for _ in range(2)] == [(1, 0, 0), (1, 1, 0)]
    other = fetch(1, term=2)
    assert worker.asked.get(timeout=30) == (2, 1, 1)
    for _ in range(2):
        worker.answer(1)
    assert other().status == 200
