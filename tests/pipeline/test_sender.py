"""Packets leave in order, encoded, from a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_accept.codecs import Fp16, Payload, Raw, decode
from lightning_accept.pipeline.events import EventLog
from lightning_accept.pipeline.messages import Packet, PipelineError, Transfer
from lightning_accept.pipeline.recorder import StageRecorder
from lightning_accept.pipeline.sender import Outgoing, Sender, describe


class Link:
    """A channel that keeps what it is given."""

    overlaps = False

    def __init__(self) -> None:
        self.packets: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.closed = threading.Event()
        self.transfer: Transfer | None = None

    def send(self, packet: Packet, on_left: Any = None) -> Transfer | None:
        if self.error is not None:
            raise self.error
        self.packets.put(packet)
        return self.transfer

    def close(self) -> None:
        self.closed.set()

    def next(self) -> Packet:
        return self.packets.get(timeout=30)


class Ends:
    """A link, its sender, and what the sender reports."""

    def __init__(self, codec: Any, link: Link | None = None, overlap: bool = False) -> None:
        self.link = Link() if link is None else link
        self.log = EventLog()
        self.errors: queue.SimpleQueue[tuple[str, BaseException]] = queue.SimpleQueue()
        self.sender = Sender(
            "link from stage 0 to stage 1",
            self.link,
            codec,
            Raw(),
            run="run",
            term=3,
            recorder=StageRecorder(self.log, 0, 3),
            peer=1,
            overlap=overlap,
            on_error=lambda doing, error: self.errors.put((doing, error)),
        )
        self.sender.start()


@pytest.fixture
def ends() -> Iterator[Any]:
    made: list[Ends] = []

    def make(codec: Any = None) -> Ends:
        made.append(Ends(Raw() if codec is None else codec))
        return made[-1]

    yield make
    for item in made:
        item.sender.close()
        assert item.link.closed.is_set()


class Counting(Raw):
    """Raw, with bits and epochs to look at."""

    log: list[tuple[str, int]]

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.log = log

    @property
    def bits(self) -> int | None:
        return 2

    @bits.setter
    def bits(self, value: int) -> None:
        self.log.append(("bits", value))

    def start_epoch(self) -> None:
        self.log.append(("epoch", 0))

    def fresh(self) -> Counting:
        self.log.append(("fresh", 0))
        return Counting(self.log)


def test_packets_carry_run_term_job_and_tensors_in_order(ends: Any) -> None:
    pair = ends()
    for job in range(5):
        pair.sender.put(Outgoing("forward", job, {"batch": job}, [torch.full((2,), float(job)), None]))
    for job in range(5):
        packet = pair.link.next()
        assert (packet.kind, packet.run, packet.term, packet.job) == ("forward", "run", 3, job)
        first, second = packet.payloads
        assert second is None
        assert isinstance(first, Payload)
        assert torch.equal(decode(first), torch.full((2,), float(job)))


def test_the_codec_is_for_training_and_the_random_state_goes_raw(ends: Any) -> None:
    pair = ends(Fp16())
    state, x = torch.get_rng_state(), torch.tensor([1.0 + 2**-20])
    pair.sender.put(Outgoing("forward", 0, {"random_state": True}, [x, state]))
    pair.sender.put(Outgoing("evaluate", 0, {}, [x]))
    activation, random_state = (decode(p) for p in pair.link.next().payloads)
    assert activation.item() == 1.0
    assert torch.equal(random_state, state)
    assert torch.equal(decode(pair.link.next().payloads[0]), x)


def test_every_tensor_has_a_codec_of_its_own_that_hears_of_bits_and_epochs(ends: Any) -> None:
    log: list[tuple[str, int]] = []
    pair = ends(Counting(log))
    x = torch.ones(2)
    pair.sender.put(Outgoing("forward", 0, {"epoch": 0}, [x, x]))
    pair.sender.put(Outgoing("forward", 1, {"epoch": 0, "bits": 3}, [x, x]))
    pair.sender.put(Outgoing("forward", 2, {"epoch": 1}, [x, x]))
    for _ in range(3):
        pair.link.next()
    assert log == [("fresh", 0), ("fresh", 0), ("bits", 3), ("bits", 3), ("epoch", 0), ("epoch", 0)]


def test_an_error_is_reported_once_and_ends_the_thread(ends: Any) -> None:
    pair = ends()
    pair.link.error = ConnectionError("gone")
    pair.sender.put(Outgoing("backward", 4, {"batch": 2, "micro": 1, "micros": 3}))
    pair.sender.put(Outgoing("backward", 5, {}))
    doing, error = pair.errors.get(timeout=30)
    assert doing == "sending of backward of batch 2, micro-batch 1 over the link from stage 0 to stage 1"
    assert error is pair.link.error
    pair.sender.close()
    assert pair.errors.empty()


class Overlapping(Link):
    """Packets that leave, and are answered, when the test says so."""

    overlaps = True

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[tuple[str, int], tuple[threading.Event, threading.Event]] = {}
        self.lock = threading.Lock()

    def of(self, kind: str, job: int) -> tuple[threading.Event, threading.Event]:
        with self.lock:
            return self.events.setdefault((kind, job), (threading.Event(), threading.Event()))

    def send(self, packet: Packet, on_left: Any = None) -> Transfer | None:
        self.packets.put(packet)
        leave, answer = self.of(packet.kind, packet.job)
        assert leave.wait(30)
        on_left()
        assert answer.wait(30)
        if self.error is not None:
            raise self.error
        return None

    def close(self) -> None:
        super().close()
        with self.lock:
            events = list(self.events.values())
        for leave, answer in events:
            leave.set()
            answer.set()


@pytest.fixture
def overlapping() -> Iterator[Ends]:
    ends = Ends(Raw(), Overlapping(), overlap=True)
    yield ends
    ends.sender.close()


def put(ends: Ends, job: int, kind: Any = "forward") -> None:
    ends.sender.put(Outgoing(kind, job, {"batch": job}, [torch.ones(4)]))


def test_the_next_packet_leaves_before_the_answer(overlapping: Ends) -> None:
    link: Any = overlapping.link
    for job in range(3):
        put(overlapping, job)
    assert link.next().job == 0
    assert link.packets.empty()  # nothing follows before all of it has left
    link.of("forward", 0)[0].set()
    assert link.next().job == 1
    link.of("forward", 1)[0].set()
    link.of("forward", 1)[1].set()
    # The first one's answer is still to come, and no third packet leaves before it.
    for event in link.of("forward", 2):
        event.set()
    assert link.packets.empty()
    link.of("forward", 0)[1].set()
    assert link.next().job == 2


def test_what_is_no_training_job_travels_alone(overlapping: Ends) -> None:
    link: Any = overlapping.link
    put(overlapping, 0)
    put(overlapping, 0, "evaluate")
    put(overlapping, 1)
    for event in link.of("forward", 1):
        event.set()
    assert link.next().kind == "forward"
    link.of("forward", 0)[0].set()
    assert link.packets.empty()
    link.of("forward", 0)[1].set()
    assert link.next().kind == "evaluate"
    for event in link.of("evaluate", 0):
        event.set()
    assert (link.next().kind, overlapping.errors.empty()) == ("forward", True)


def test_of_two_errors_the_first_is_reported_and_nothing_follows(overlapping: Ends) -> None:
    link: Any = overlapping.link
    link.error = ConnectionError("gone")
    for job in range(3):
        put(overlapping, job)
    for job in range(2):
        link.of("forward", job)[0].set()
        assert link.next().job == job
    for job in range(2):
        link.of("forward", job)[1].set()
    doing, error = overlapping.errors.get(timeout=30)
    assert "sending of forward of batch" in doing and error is link.error
    overlapping.sender.close()
    assert overlapping.errors.empty() and link.packets.empty()


class Refusing(Raw):
    def encode(self, tensor: Any) -> Any:
        from lightning_accept.codecs import CodecError

        raise CodecError("no")

    def fresh(self) -> Refusing:
        return self


def test_what_cannot_be_encoded_is_named(ends: Any) -> None:
    pair = ends(Refusing())
    pair.sender.put(Outgoing("forward", 0, {"batch": 9}, [torch.ones(1)]))
    _, error = pair.errors.get(timeout=30)
    assert isinstance(error, PipelineError)
    assert str(error) == "link from stage 0 to stage 1: cannot encode tensor 0 of forward of batch 9: no"


def test_figures_count_packets_and_bytes(ends: Any) -> None:
    pair = ends(Fp16())
    pair.sender.put(Outgoing("forward", 0, {}, [torch.ones(10), None]))
    pair.sender.put(Outgoing("flush", 1, {}))
    pair.link.next(), pair.link.next()
    pair.sender.close()
    figures = pair.sender.figures
    assert (figures.packets, figures.raw_bytes, figures.payload_bytes) == (1, 40, 20)
    assert figures.encode_seconds >= 0
    assert figures.send_seconds >= 0


def test_transfers_tell_the_links_speed(ends: Any) -> None:
    pair = ends()
    assert pair.sender.stats()["bandwidth"] is None
    pair.link.transfer = Transfer(100_000, 0.82, 0.02)
    for job in range(2):
        pair.sender.put(Outgoing("forward", job, {}, [torch.zeros(4)]))
        pair.link.next()
    pair.sender.close()
    stats = pair.sender.stats()
    assert stats["bandwidth"] == pair.sender.meter.bandwidth == pytest.approx(1e6)
    assert stats["latency"] == 0.01
    assert stats["packets"] == 2


def test_packets_in_words() -> None:
    assert describe("flush", {}) == "flush"
    assert describe("forward", {"batch": 3, "micros": 1, "micro": 0}) == "forward of batch 3"
