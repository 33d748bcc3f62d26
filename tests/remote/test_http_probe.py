"""Probing over HTTP, with real workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_accept.pipeline.messages import PipelineError, TransportError
from lightning_accept.remote import http_probe
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.interrupt import Interrupter


@pytest.fixture
def claimed(start_worker: Callable[..., Any]) -> Iterator[Callable[..., HttpWorker]]:
    handles: list[HttpWorker] = []

    def make(link_token: str = "link") -> HttpWorker:
        handles.append(HttpWorker(start_worker(max_body=100_000).url, "secret", timeout=30.0))
        handles[-1].claim("run-1", "me", link_token)
        return handles[-1]

    yield make
    for handle in handles:
        handle.close()
        handle.release()


def test_the_link_to_a_worker_and_back(claimed: Any) -> None:
    there, back = claimed().measure_link(0.05)
    for speed in (there, back):
        assert 0 < speed.bandwidth < float("inf")
        assert 0 <= speed.latency < 1.0


def test_empty_messages_keep_the_connection(claimed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    watch = Interrupter.watch
    monkeypatch.setattr(Interrupter, "watch", lambda self, sock: (opened.append(sock), watch(self, sock)))
    # Another connection would cost another round trip, and double the latency that is found.
    claimed().measure_link(0.05)
    assert len(opened) == 2  # the claim's, and that of the measuring


def test_the_link_between_two_workers(claimed: Any) -> None:
    first, second = claimed(), claimed()
    assert 0 < first.measure_link_to(second.address, 0.05).bandwidth < float("inf")


def test_neighbours_need_the_same_link_token(claimed: Any) -> None:
    first, second = claimed(), claimed("another")
    with pytest.raises(
        PipelineError, match=rf"refused the measuring of its link to {second.address}: .*token is wrong"
    ):
        first.measure_link_to(second.address, 0.05)


def test_an_address_that_is_none(claimed: Any) -> None:
    with pytest.raises(PipelineError, match="'nowhere' is not the URL of a worker"):
        claimed().measure_link_to("nowhere", 0.05)


def test_a_link_too_slow_is_given_up(claimed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_probe, "longest", lambda seconds: -1.0)
    with pytest.raises(TransportError, match="too slow to be measured within"):
        claimed().measure_link(0.05)


def test_measuring_ends_with_the_run(claimed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def measure(self: http_probe.LinkProbe, run: str, seconds: float) -> Any:
        begun.set()
        assert self._interrupter.wait(30)
        raise TransportError("the connection was closed from this side")

    monkeypatch.setattr(http_probe.LinkProbe, "measure", measure)
    handle, errors = claimed(), []

    def call() -> None:
        try:
            handle.measure_link_to("http://127.0.0.1:9", 1.0)
        except TransportError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(30)
    handle.release()
    thread.join(30)
    assert not thread.is_alive()
    assert "lost to this run" in errors[0]
