"""What a packet's way over HTTP tells about the link."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accept.pipeline.messages import Transfer
from lightning_accept.remote.packet_sender import PacketSender
from lightning_accept.remote.peer import Reply
from lightning_accept.remote.wire import WAITED_HEADER


class FakePeer:
    """Answers with times made up by the test."""

    def __init__(self, empty: list[float], packets: list[tuple[float, dict[str, str]]]) -> None:
        self.empty = empty
        self.packets = packets
        self.paths: list[str] = []

    def request(self, method: str, path: str, what: str, **options: Any) -> Reply:
        self.paths.append(f"{method} {path}")
        seconds, headers = (self.empty.pop(0), {}) if method == "GET" else self.packets.pop(0)
        return Reply(200, headers, memoryview(b""), seconds, Transfer(0, 0.0))

    def close(self) -> None:
        pass


def send(peer: FakePeer, packet: Any, count: int = 1) -> list[Transfer]:
    sender = PacketSender(peer)  # type: ignore[arg-type]
    return [sender.send(packet(job), bytes(1000)) for job in range(count)]


def test_the_round_trip_is_asked_for_once_and_the_receivers_waiting_is_left_out(packet: Any) -> None:
    peer = FakePeer([0.3, 0.02, 0.025], [(5.1, {WAITED_HEADER: "5.0"}), (0.2, {})])
    first, second = send(peer, packet, 2)
    assert (first.nbytes, first.seconds, first.round_trip) == (1000, pytest.approx(0.1), 0.02)
    assert (second.seconds, second.round_trip) == (0.2, 0.02)
    assert peer.paths == ["GET /runs/run-1/probe"] * 3 + ["POST /runs/run-1/packets"] * 2


def test_a_quicker_packet_lowers_the_round_trip(packet: Any) -> None:
    (transfer,) = send(FakePeer([0.3, 0.3, 0.3], [(0.1, {})]), packet)
    assert transfer.round_trip == 0.1


@pytest.mark.parametrize("waited", ["nonsense", "nan", "-3", "inf"])
def test_a_waiting_time_that_is_none(packet: Any, waited: str) -> None:
    (transfer,) = send(FakePeer([0.1] * 3, [(0.5, {WAITED_HEADER: waited})]), packet)
    assert transfer.seconds == 0.5


def test_a_waiting_time_beyond_the_whole(packet: Any) -> None:
    (transfer,) = send(FakePeer([0.1] * 3, [(0.5, {WAITED_HEADER: "1.0"})]), packet)
    assert (transfer.seconds, transfer.round_trip) == (0.0, 0.0)
