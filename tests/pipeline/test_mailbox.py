"""What comes back to the central node, and what goes wrong meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_accept.codecs import Payload, Raw
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.mailbox import Mailbox
from lightning_accept.pipeline.messages import Fault, Packet, PipelineError, StageFault, Transfer, TransportError


class Worker:
    """A handle fed by the test."""

    def __init__(self, name: str) -> None:
        self.name = self.address = name
        self.items: dict[str, queue.SimpleQueue[Any]] = {d: queue.SimpleQueue() for d in ("up", "down", "poll")}
        self.closed = threading.Event()

    def receive(self, direction: str, timeout: float) -> Any:
        return self._next(direction)

    def poll(self, timeout: float) -> Any:
        return self._next("poll")

    def _next(self, what: str) -> Any:
        item = self.items[what].get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self.closed.set()
        for items in self.items.values():
            items.put(TransportError("interrupted"))


@pytest.fixture
def workers() -> list[Any]:
    return [Worker("first"), Worker("last")]


@pytest.fixture
def mailbox(workers: list[Any]) -> Iterator[Mailbox]:
    box = Mailbox(workers, torch.device("cpu"))
    box.start()
    box.new_term(1)
    yield box
    box.close()
    box.close()
    assert not any(thread.is_alive() for thread in box._threads)


def packet(kind: Any = "forward", job: int = 0, term: int = 1, payload: Any = None) -> Packet:
    payload = Raw().encode(torch.full((2,), float(job))) if payload is None else payload
    return Packet(kind, "run", term, job, {"batch": job}, (payload, None))


FAULT = Fault(2, ("a", "b"), "last", "forward of batch 3", "ValueError: no", "trace")


def test_outputs_come_from_the_last_worker_and_gradients_from_the_first(mailbox: Mailbox, workers: list[Any]) -> None:
    for job in (1, 0):
        workers[1].items["down"].put(packet(job=job))
    workers[0].items["up"].put(packet("backward", 0))
    for job in (0, 1):
        meta, tensors = mailbox.wait("forward", job, "it", 30.0)
        assert meta == {"batch": job}
        assert tensors[1] is None
        assert torch.equal(tensors[0], torch.full((2,), float(job)))  # type: ignore[arg-type]
    assert mailbox.wait("backward", 0, "it", 30.0)[0] == {"batch": 0}


def test_packets_of_an_earlier_term_are_dropped(mailbox: Mailbox, workers: list[Any]) -> None:
    workers[1].items["down"].put(packet(job=0, term=1))
    workers[1].items["down"].put(packet(job=9, term=1))
    mailbox.wait("forward", 9, "it", 30.0)
    mailbox.new_term(2)
    workers[1].items["down"].put(packet(job=1, term=1))
    workers[1].items["down"].put(packet(job=2, term=2))
    mailbox.wait("forward", 2, "it", 30.0)
    for job in (0, 1):
        with pytest.raises(PipelineError, match="waited 0 s"):
            mailbox.wait("forward", job, "it", 0.0)


def test_the_ends_of_the_chain_may_change(mailbox: Mailbox, workers: list[Any]) -> None:
    first, last = workers
    mailbox.follow(last, first)
    for direction, worker in (("up", first), ("down", last)):
        worker.items[direction].put(TransportError("its stage was dropped"))  # no longer an end: nothing is amiss
    first.items["down"].put(packet())
    last.items["up"].put(packet("backward"))
    mailbox.wait("forward", 0, "it", 30.0)
    mailbox.wait("backward", 0, "it", 30.0)
    mailbox.follow(first, first)
    first.items["up"].put(packet("backward", 1))
    mailbox.wait("backward", 1, "it", 30.0)
    mailbox.follow(first, last)
    last.items["down"].put(packet(job=2))
    mailbox.wait("forward", 2, "it", 30.0)
    lost = TransportError("worker lost")
    last.items["down"].put(lost)
    with pytest.raises(TransportError, match="worker lost"):
        mailbox.wait("forward", 3, "it", 30.0)


def test_the_speed_of_what_comes_in(mailbox: Mailbox, workers: list[Any]) -> None:
    sent = replace(packet(), transfer=Transfer(100_000, 0.8))
    workers[1].items["down"].put(sent)
    mailbox.wait("forward", 0, "it", 30.0)
    assert mailbox.speed("down") == Speed(1e6, 0.0)
    assert mailbox.speed("up") is None
    mailbox.new_term(2)
    assert mailbox.speed("down") is None


def test_a_wait_that_takes_too_long_names_what_and_whom(workers: list[Any]) -> None:
    ticks = iter([0.0, 5.0])
    box = Mailbox(workers, torch.device("cpu"), clock=lambda: next(ticks))
    with pytest.raises(PipelineError) as caught:
        box.wait("forward", 0, "the output of batch 0", 3.0)
    assert str(caught.value) == (
        "waited 3 s for the output of batch 0, which did not come; all workers answer (first, last). If the links are"
        " that slow, raise AccEPTStrategy(batch_timeout=...)"
    )


@pytest.mark.parametrize("what", ["up", "down", "poll"])
def test_a_lost_worker_ends_the_wait(mailbox: Mailbox, workers: list[Any], what: str) -> None:
    lost = TransportError("worker lost")
    workers[0 if what == "up" else 1].items[what].put(lost)
    with pytest.raises(TransportError) as caught:
        mailbox.wait("forward", 0, "it", 30.0)
    assert caught.value is lost
    assert mailbox.failed


def test_a_fault_ends_the_wait_and_names_the_stage(mailbox: Mailbox, workers: list[Any]) -> None:
    workers[1].items["poll"].put(None)
    workers[1].items["poll"].put(FAULT)
    with pytest.raises(StageFault, match=r"stage 2 \(a, b\) on last failed in the forward of batch 3: ValueError: no"):
        mailbox.wait("forward", 0, "it", 30.0)


def test_a_faults_own_report_beats_its_echo_and_nothing_else_does(mailbox: Mailbox) -> None:
    mailbox.check()
    mailbox.fail(TransportError("echo"))
    mailbox.fail(StageFault(FAULT))
    for later in (TransportError("echo"), StageFault(FAULT), PipelineError("closed")):
        mailbox.fail(later)
        with pytest.raises(StageFault) as caught:
            mailbox.check()
        assert caught.value is not later


def test_a_packet_that_cannot_be_decoded_names_the_worker(mailbox: Mailbox, workers: list[Any]) -> None:
    workers[1].items["down"].put(packet(payload=Payload({}, {"codec": "unheard-of"})))
    with pytest.raises(PipelineError, match="forward of batch 0 from last cannot be decoded: "):
        mailbox.wait("forward", 0, "it", 30.0)
