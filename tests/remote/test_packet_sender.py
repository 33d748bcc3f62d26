"""What a packet's way over HTTP tells about the link."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lightning_accept.pipeline.messages import Transfer, TransportError
from lightning_accept.remote.packet_sender import PacketSender
from lightning_accept.remote.peer import Reply
from lightning_accept.remote.window import Window
from lightning_accept.remote.wire import PASSED_HEADER


class FakePeer:
    """Answers with times made up by the test."""

    def __init__(self, empty: list[float], packets: list[tuple[float, dict[str, str]]]) -> None:
        self.empty = empty
        self.packets = packets
        self.paths: list[str] = []
        self.queries: list[dict[str, str] | None] = []

    def request(self, method: str, path: str, what: str, **options: Any) -> Reply:
        self.paths.append(f"{method} {path}")
        self.queries.append(options.get("query"))
        seconds, headers = (self.empty.pop(0), {}) if method == "GET" else self.packets.pop(0)
        return Reply(200, headers, memoryview(b""), seconds, Transfer(0, 0.0))

    def close(self) -> None:
        pass


def send(peer: FakePeer, packet: Any, count: int = 1) -> list[Transfer]:
    sender = PacketSender(lambda: peer)  # type: ignore[arg-type, return-value]
    return [sender.send(packet(job), bytes(1000)) for job in range(count)]


def test_the_receiver_counts_and_the_round_trip_is_asked_for_once(packet: Any) -> None:
    peer = FakePeer([0.3, 0.02, 0.025], [(5.1, {PASSED_HEADER: "900 0.5"}), (0.2, {PASSED_HEADER: "700 0.25"})])
    assert send(peer, packet, 2) == [Transfer(900, 0.52, 0.02), Transfer(700, 0.27, 0.02)]
    assert peer.paths == ["GET /runs/run-1/probe"] * 3 + ["POST /runs/run-1/packets"] * 2


def test_a_window_is_asked_for_once_the_bandwidth_is_known(packet: Any) -> None:
    peer, back = FakePeer([0.1] * 3, [(2.1, {PASSED_HEADER: "1000000 2.0"})] * 2), Window()
    sender = PacketSender(lambda: peer, back)  # type: ignore[arg-type, return-value]
    back.passed(10**6, 1.0)
    for job in range(2):
        sender.send(packet(job), bytes(1000))
    assert peer.queries[-2:] == [None, {"window": "112500"}]
    assert back.nbytes == 225_000  # whose round trip is the same


def test_a_quicker_packet_lowers_the_round_trip(packet: Any) -> None:
    (transfer,) = send(FakePeer([0.3, 0.3, 0.3], [(0.1, {})]), packet)
    assert transfer.round_trip == 0.1


@pytest.mark.parametrize("told", ["nonsense", "1", "1 nan", "-1 1", "1 -3", "1 inf", "1.5 1", "1 1 1", ""])
def test_what_the_receiver_cannot_mean_counts_as_nothing(packet: Any, told: str) -> None:
    (transfer,) = send(FakePeer([0.1] * 3, [(0.5, {PASSED_HEADER: told})]), packet)
    assert transfer == Transfer(0, 0.1, 0.1)


def test_two_packets_are_under_way_on_connections_of_their_own(packet: Any) -> None:
    both = threading.Barrier(2)

    class Meeting(FakePeer):
        def request(self, method: str, path: str, what: str, **options: Any) -> Reply:
            if method == "POST":
                both.wait(30)
            return super().request(method, path, what, **options)

    peers = [Meeting([0.1] * 3, [(0.5, {})] * 2) for _ in range(2)]
    made = iter(peers)
    sender = PacketSender(lambda: next(made))  # type: ignore[arg-type, return-value]
    threads = [threading.Thread(target=sender.send, args=(packet(job), b"x")) for job in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all("POST /runs/run-1/packets" in peer.paths for peer in peers)


def test_a_connection_is_free_again_after_an_error(packet: Any) -> None:
    class Broken(FakePeer):
        def request(self, method: str, path: str, what: str, **options: Any) -> Reply:
            raise TransportError("gone")

    sender = PacketSender(lambda: Broken([], []))  # type: ignore[arg-type, return-value]
    for job in range(5):
        with pytest.raises(TransportError, match="gone"):
            sender.send(packet(job), b"x")
