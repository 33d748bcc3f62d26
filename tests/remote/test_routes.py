"""The worker over raw HTTP: who is let in, what is refused, and that nothing malformed is acted on."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from lightning_accept.pipeline.messages import Fault, QueueFull
from lightning_accept.remote.frames import pack_frame
from lightning_accept.remote.probe import LARGEST_PROBE
from lightning_accept.remote.wire import pack_deployment, pack_packet, unpack_packet, unpack_state

AUTH = {"Authorization": "Bearer secret"}
LINK = {"Authorization": "Bearer link"}


@pytest.fixture
def http() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture
def worker(start_worker: Callable[..., Any]) -> Any:
    return start_worker(max_body=10_000, body_patience=0.2, queue_patience=0.0)


@pytest.fixture
def deployed(worker: Any, http: requests.Session, deployment: Callable[..., Any]) -> Any:
    claim(http, worker)
    reply = http.post(f"{worker.url}/runs/run-1/deploy", data=pack_deployment(deployment()), headers=AUTH, timeout=30)
    assert reply.status_code == 200, reply.text
    return worker


def claim(http: requests.Session, worker: Any, run: str = "run-1", holder: str = "me") -> requests.Response:
    body = {"run": run, "holder": holder, "link_token": "link"}
    return http.post(f"{worker.url}/runs", json=body, headers=AUTH, timeout=30)


ROUTES = [
    ("GET", "/status"),
    ("POST", "/runs"),
    ("DELETE", "/runs/run-1"),
    ("POST", "/runs/run-1/deploy"),
    ("POST", "/runs/run-1/packets"),
    ("POST", "/runs/run-1/handover"),
    ("POST", "/runs/run-1/forget?term=1"),
    ("POST", "/runs/run-1/profile?number=1"),
    ("POST", "/runs/run-1/measure-link"),
    ("POST", "/runs/run-1/probe"),
    ("GET", "/runs/run-1/probe?bytes=1"),
    ("GET", "/runs/run-1/outbox/down?term=1&after=0&received=0"),
    ("GET", "/runs/run-1/state"),
    ("GET", "/runs/run-1/poll"),
    ("GET", "/runs/run-1/stats"),
    ("GET", "/runs/run-1/events?term=1&after=0"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer wrong", "Bearer secretx", "Basic secret", "secret"])
def test_nothing_is_done_without_the_token(
    worker: Any, http: requests.Session, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    reply = http.request(method, worker.url + path, headers=headers, json={"run": "a", "holder": "b"}, timeout=30)
    assert reply.status_code == 401
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.json()["error"] == ("a bearer token is required" if header is None else "the bearer token is wrong")
    assert http.get(f"{worker.url}/status", headers=AUTH, timeout=30).json()["holder"] is None


def test_healthz_needs_no_token_and_tells_nothing(worker: Any, http: requests.Session) -> None:
    reply = http.get(f"{worker.url}/healthz", timeout=30).json()
    assert set(reply) == {"status", "version"}
    assert reply["status"] == "ok"


def test_status_tells_facts_and_holder(deployed: Any, http: requests.Session) -> None:
    reply = http.get(f"{deployed.url}/status", headers=AUTH, timeout=30).json()
    assert reply["facts"]["device"] == "cpu"
    assert reply["facts"]["max_body"] == 10_000
    assert reply["facts"]["lease"] == 60
    assert (reply["holder"]["run"], reply["holder"]["holder"], reply["holder"]["term"]) == ("run-1", "me", 1)
    assert reply["stats"] == {"jobs": 0}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/runs/x/outbox/sideways", 404), ("GET", "/runs", 405), ("PUT", "/healthz", 405)],
)
def test_other_paths_and_methods(worker: Any, http: requests.Session, method: str, path: str, status: int) -> None:
    reply = http.request(method, worker.url + path, headers=AUTH, timeout=30)
    assert reply.status_code == status
    assert reply.json()["code"] == "path"
    assert ("Allow" in reply.headers) == (status == 405)


def test_a_second_run_is_told_who_holds_the_worker_and_since_when(worker: Any, http: requests.Session) -> None:
    assert claim(http, worker, holder="ann@laptop").status_code == 200
    assert claim(http, worker, holder="ann@laptop").status_code == 200
    reply = claim(http, worker, run="run-2", holder="bob")
    assert reply.status_code == 409
    body = reply.json()
    assert (body["code"], body["run"], body["holder"]) == ("busy", "run-1", "ann@laptop")
    assert f"held by ann@laptop since {body['since']}" in body["error"]
    assert claim(http, worker, holder="bob").status_code == 409
    assert http.delete(f"{worker.url}/runs/run-2", headers=AUTH, timeout=30).status_code == 204
    assert claim(http, worker, run="run-2", holder="bob").status_code == 409
    assert http.delete(f"{worker.url}/runs/run-1", headers=AUTH, timeout=30).status_code == 204
    assert claim(http, worker, run="run-2", holder="bob").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"run": "a"}',
        b'{"run": "a", "holder": "b"}',
        b'{"run": 1, "holder": "b", "link_token": "c"}',
        b'{"run": "../x", "holder": "b", "link_token": "c"}',
        b'{"run": "a", "holder": "b", "link_token": ""}',
        b'{"run": "a", "holder": "b", "link_token": "two words"}',
        b'{"run": "a", "holder": "b", "link_token": "' + b"c" * 201 + b'"}',
    ],
)
def test_malformed_claims_are_refused(worker: Any, http: requests.Session, body: bytes) -> None:
    reply = http.post(f"{worker.url}/runs", data=body, headers=AUTH, timeout=30)
    assert reply.status_code == 400
    assert http.get(f"{worker.url}/status", headers=AUTH, timeout=30).json()["holder"] is None


@pytest.mark.parametrize("path", ["/runs/run-1/deploy", "/runs/run-1/packets"])
def test_a_body_over_the_limit_is_refused_with_both_numbers(deployed: Any, http: requests.Session, path: str) -> None:
    reply = http.post(deployed.url + path, data=bytes(10_001), headers=AUTH, timeout=30)
    assert reply.status_code == 413
    assert "10001 bytes" in reply.json()["error"]
    assert "10000 bytes" in reply.json()["error"]
    assert deployed.stages[0].taken == []


def test_a_body_without_length_is_refused(deployed: Any, http: requests.Session) -> None:
    reply = http.post(f"{deployed.url}/runs/run-1/packets", data=iter([b"x"]), headers=AUTH, timeout=30)
    assert reply.status_code == 411


def malformed_frames() -> list[bytes]:
    text = json.dumps({"__metadata__": {"lightning_accept": "packet", "message": '{"kind": "os.system"}'}}).encode()
    return [
        b"",
        b"x",
        b"\x80\x04\x95K\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", len(text)) + text,
    ]


@pytest.mark.parametrize("path", ["deploy", "packets"])
@pytest.mark.parametrize("frame", malformed_frames())
def test_malformed_frames_are_refused_and_nothing_is_executed(
    deployed: Any, http: requests.Session, path: str, frame: bytes
) -> None:
    reply = http.post(f"{deployed.url}/runs/run-1/{path}", data=frame, headers=AUTH, timeout=30)
    assert reply.status_code == 400
    assert reply.json()["code"] == "frame"
    assert "Traceback" not in reply.text
    assert len(deployed.stages) == 1
    assert deployed.stages[0].taken == []


def test_the_link_token_opens_nothing_but_what_neighbours_need(
    deployed: Any, http: requests.Session, packet: Callable[..., Any]
) -> None:
    for method, path in ROUTES:
        if not path.endswith(("packets", "handover")) and "/probe" not in path:
            assert http.request(method, deployed.url + path, headers=LINK, timeout=30).status_code == 401
    frame = pack_packet(packet())
    assert http.post(f"{deployed.url}/runs/run-2/packets", data=frame, headers=LINK, timeout=30).status_code == 401
    assert http.post(f"{deployed.url}/runs/run-1/packets", data=frame, headers=LINK, timeout=30).status_code == 200
    http.delete(f"{deployed.url}/runs/run-1", headers=AUTH, timeout=30)
    assert http.post(f"{deployed.url}/runs/run-1/packets", data=frame, headers=LINK, timeout=30).status_code == 401


def test_another_worker_takes_layers_over_with_the_link_token(deployed: Any, http: requests.Session) -> None:
    order = {"term": 1, "names": ["weight"]}
    reply = http.post(f"{deployed.url}/runs/run-1/handover?wait=30", json=order, headers=LINK, timeout=30)
    assert list(unpack_state(reply.content).tensors) == ["weight"]
    for changes, status, code in (
        ({"term": 2}, 409, "term"),
        ({"names": ["nothing"]}, 400, "frame"),
        ({"names": "weight"}, 400, "frame"),
        ({"names": [1]}, 400, "frame"),
        ({"term": True}, 400, "frame"),
        ({"term": None}, 400, "frame"),
    ):
        reply = http.post(f"{deployed.url}/runs/run-1/handover", json={**order, **changes}, headers=LINK, timeout=30)
        assert (reply.status_code, reply.json()["code"]) == (status, code)
    reply = http.post(f"{deployed.url}/runs/run-1/handover", data=b"[]", headers=LINK, timeout=30)
    assert reply.status_code == 400
    reply = http.post(f"{deployed.url}/runs/run-2/handover", json=order, headers=LINK, timeout=30)
    assert reply.status_code == 401


def test_a_stage_of_an_earlier_term_is_dropped_when_told(deployed: Any, http: requests.Session) -> None:
    url = f"{deployed.url}/runs/run-1"
    assert http.post(f"{url}/forget?term=1", headers=AUTH, timeout=30).status_code == 204
    assert not deployed.stages[0].closed.is_set()
    for _ in range(2):
        assert http.post(f"{url}/forget?term=2", headers=AUTH, timeout=30).status_code == 204
        assert deployed.stages[0].closed.is_set()
    assert http.get(f"{url}/stats", headers=AUTH, timeout=30).json() == {}
    assert http.get(f"{url}/poll", headers=AUTH, timeout=30).json() == {"fault": None}
    assert http.post(f"{url}/handover", json={"term": 1, "names": []}, headers=AUTH, timeout=30).status_code == 409
    assert http.post(f"{url}/forget", headers=AUTH, timeout=30).status_code == 400


def outbox(http: requests.Session, worker: Any, **query: Any) -> requests.Response:
    query = {"term": 1, "after": 0, "received": query.get("after", 0), "wait": 20, **query}
    return http.get(f"{worker.url}/runs/run-1/outbox/down", params=query, headers=AUTH, timeout=30)


def test_the_outbox_numbers_items_and_keeps_them_until_acknowledged(
    deployed: Any, http: requests.Session, packet: Callable[..., Any]
) -> None:
    for job in range(2):
        frame = pack_packet(packet(job))
        http.post(f"{deployed.url}/runs/run-1/packets", data=frame, headers=AUTH, timeout=30)
    for _ in range(2):
        reply = outbox(http, deployed)
        assert reply.headers["X-Accept-Item"] == "1"
        assert unpack_packet(reply.content).job == 0
    reply = outbox(http, deployed, after=1)
    assert reply.headers["X-Accept-Item"] == "2"
    assert unpack_packet(reply.content).job == 1
    assert outbox(http, deployed, after=2, wait=0).status_code == 204
    assert outbox(http, deployed, after=1).status_code == 400
    assert outbox(http, deployed, after=2, received=3).status_code == 400
    assert outbox(http, deployed, after=5).status_code == 400
    assert outbox(http, deployed, after=2, term=2).status_code == 409


@pytest.mark.parametrize(
    "query", [{"after": "x"}, {"received": ""}, {"after": "-1"}, {"term": ""}, {"wait": "nan"}, {"wait": "-1"}]
)
def test_malformed_queries_are_refused(deployed: Any, http: requests.Session, query: dict[str, str]) -> None:
    assert outbox(http, deployed, **query).status_code == 400


def test_back_pressure_is_503_with_the_time_to_wait(
    deployed: Any, http: requests.Session, packet: Callable[..., Any]
) -> None:
    deployed.stages[0].refusals = [QueueFull(0.25)]
    frame = pack_packet(packet())
    reply = http.post(f"{deployed.url}/runs/run-1/packets", data=frame, headers=AUTH, timeout=30)
    assert reply.status_code == 503
    assert reply.headers["Retry-After"] == "1"
    assert reply.json()["retry_after"] == 0.25
    reply = http.post(f"{deployed.url}/runs/run-1/packets", data=frame, headers=AUTH, timeout=30)
    assert reply.status_code == 200


def test_a_packet_waits_for_room_before_it_is_turned_away(
    start_worker: Callable[..., Any], http: requests.Session, deployment: Any, packet: Any
) -> None:
    worker = start_worker(queue_patience=30.0)
    claim(http, worker)
    http.post(f"{worker.url}/runs/run-1/deploy", data=pack_deployment(deployment()), headers=AUTH, timeout=30)
    worker.stages[0].refusals = [QueueFull(0.01), QueueFull(0.01)]
    reply = http.post(f"{worker.url}/runs/run-1/packets", data=pack_packet(packet()), headers=AUTH, timeout=30)
    assert reply.status_code == 200
    assert len(worker.stages[0].taken) == 1


def test_packets_of_another_term_and_before_a_stage_are_refused(
    worker: Any, http: requests.Session, deployment: Any, packet: Any
) -> None:
    claim(http, worker)
    url = f"{worker.url}/runs/run-1"
    reply = http.post(f"{url}/packets", data=pack_packet(packet()), headers=AUTH, timeout=30)
    assert (reply.status_code, reply.json()["code"]) == (409, "term")
    http.post(f"{url}/deploy", data=pack_deployment(deployment()), headers=AUTH, timeout=30)
    reply = http.post(f"{url}/packets", data=pack_packet(packet(term=2)), headers=AUTH, timeout=30)
    assert (reply.status_code, reply.json()["code"]) == (409, "term")
    assert worker.stages[0].taken == []


def test_deploying_twice_builds_once_and_an_older_term_is_refused(
    deployed: Any, http: requests.Session, deployment: Any
) -> None:
    url = f"{deployed.url}/runs/run-1/deploy"
    assert http.post(url, data=pack_deployment(deployment()), headers=AUTH, timeout=30).status_code == 200
    assert len(deployed.stages) == 1
    assert http.post(url, data=pack_deployment(deployment(term=2)), headers=AUTH, timeout=30).status_code == 200
    assert len(deployed.stages) == 2
    assert deployed.stages[0].closed.is_set()
    assert http.post(url, data=pack_deployment(deployment(term=1)), headers=AUTH, timeout=30).status_code == 409
    assert (
        http.post(url, data=pack_deployment(deployment(run="x", term=3)), headers=AUTH, timeout=30).status_code == 409
    )
    assert len(deployed.stages) == 2


def test_a_failing_stage_is_reported_with_its_fault(deployed: Any, http: requests.Session, packet: Any) -> None:
    fault = Fault(1, ("a",), deployed.url, "forward of batch 7", "ValueError: no", "the traceback")
    deployed.stages[0].fault = fault
    reply = http.post(f"{deployed.url}/runs/run-1/packets", data=pack_packet(packet()), headers=AUTH, timeout=30)
    assert reply.status_code == 500
    assert reply.json()["fault"]["traceback"] == "the traceback"
    reply = http.get(f"{deployed.url}/runs/run-1/poll", params={"wait": "20"}, headers=AUTH, timeout=30)
    assert reply.json()["fault"]["doing"] == "forward of batch 7"


def test_a_stage_that_cannot_be_built(worker: Any, http: requests.Session, deployment: Any) -> None:
    claim(http, worker)
    url = f"{worker.url}/runs/run-1/deploy"
    refused = deployment(spec={"refuse": "no such op"})
    reply = http.post(url, data=pack_deployment(refused), headers=AUTH, timeout=30)
    assert reply.status_code == 400
    assert reply.json()["error"] == "stage 1 was refused: no such op"
    broken = deployment(spec={"break": "oops"}, term=2)
    reply = http.post(url, data=pack_deployment(broken), headers=AUTH, timeout=30)
    assert reply.status_code == 500
    assert reply.json()["fault"]["error"] == "KeyError: 'oops'"
    assert reply.json()["fault"]["where"] == worker.url
    assert http.post(url, data=pack_deployment(deployment(term=3)), headers=AUTH, timeout=30).status_code == 200


def test_state_and_stats(deployed: Any, http: requests.Session) -> None:
    state = unpack_state(http.get(f"{deployed.url}/runs/run-1/state", headers=AUTH, timeout=30).content)
    assert state.spec == {"taken": 0}
    assert state.tensors["weight"].shape == (2, 3)
    assert http.get(f"{deployed.url}/runs/run-1/stats", headers=AUTH, timeout=30).json() == {"jobs": 0}


def test_a_stalled_body_gets_408_while_others_are_served(deployed: Any, http: requests.Session) -> None:
    port = int(deployed.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stalled:
        stalled.sendall(
            b"POST /runs/run-1/packets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Length: 1000\r\n\r\n" + bytes(500)
        )
        for _ in range(3):
            assert http.get(f"{deployed.url}/healthz", timeout=30).status_code == 200
        assert stalled.recv(100).startswith(b"HTTP/1.1 408 ")
    assert deployed.stages[0].taken == []


def test_a_wrong_token_is_refused_before_the_body_is_sent(worker: Any) -> None:
    port = int(worker.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(
            b"POST /runs/run-1/packets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 9999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_the_lease_ends_when_the_central_node_is_silent(
    start_worker: Callable[..., Any], http: requests.Session, deployment: Any, packet: Any
) -> None:
    now = [0.0]
    worker = start_worker(clock=lambda: now[0], lease=60.0)
    claim(http, worker)
    url = f"{worker.url}/runs/run-1"
    http.post(f"{url}/deploy", data=pack_deployment(deployment()), headers=AUTH, timeout=30)
    now[0] = 50.0
    assert http.get(f"{url}/poll", headers=AUTH, timeout=30).status_code == 200
    now[0] = 100.0
    # A neighbour's packet is no sign of life of the central node.
    assert http.post(f"{url}/packets", data=pack_packet(packet()), headers=LINK, timeout=30).status_code == 200
    assert claim(http, worker, run="run-2").status_code == 409
    now[0] = 111.0
    assert claim(http, worker, run="run-2").status_code == 200
    assert worker.stages[0].closed.is_set()
    reply = http.get(f"{url}/poll", headers=AUTH, timeout=30)
    assert reply.status_code == 404
    assert "silent for more than 60 s" in reply.json()["error"]


def test_a_packets_reply_tells_how_fast_it_came(
    start_worker: Callable[..., Any], http: requests.Session, deployment: Any, packet: Any
) -> None:
    worker = start_worker(queue_patience=30.0)
    claim(http, worker)
    http.post(f"{worker.url}/runs/run-1/deploy", data=pack_deployment(deployment()), headers=AUTH, timeout=30)
    worker.stages[0].refusals = [QueueFull(0.5)]
    frame = pack_packet(packet(size=500_000))
    started = time.perf_counter()
    reply = http.post(f"{worker.url}/runs/run-1/packets", data=frame, headers=LINK, timeout=30)
    nbytes, seconds = reply.headers["X-Accept-Passed"].split()
    assert 0 < int(nbytes) < len(frame)
    # Waiting for room is no time on the link.
    assert 0 < float(seconds) <= time.perf_counter() - started - 0.5


def test_probes_are_answered_and_dropped(worker: Any, http: requests.Session) -> None:
    claim(http, worker)
    url = f"{worker.url}/runs/run-1/probe"
    for headers in (AUTH, LINK):
        assert http.post(url, data=bytes(50_000), headers=headers, timeout=30).status_code == 200
        assert len(http.get(url, params={"bytes": "50000"}, headers=headers, timeout=30).content) == 50_000
        assert http.get(url, params={"bytes": "0"}, headers=headers, timeout=30).content == b""


def test_probes_have_a_largest_size(worker: Any, http: requests.Session) -> None:
    claim(http, worker)
    url = f"{worker.url}/runs/run-1/probe"
    for size in (str(LARGEST_PROBE + 1), "-1", "many", ""):
        assert http.get(url, params={"bytes": size}, headers=LINK, timeout=30).status_code == 400
    port = int(worker.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(
            b"POST /runs/run-1/probe HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer link\r\n"
            b"Content-Length: %d\r\n\r\n" % (LARGEST_PROBE + 1)
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/runs/run-1/measure-link", "/runs/run-1/profile?number=1"])
def test_the_link_token_orders_no_measuring(worker: Any, http: requests.Session, path: str) -> None:
    claim(http, worker)
    assert http.post(worker.url + path, headers=LINK, timeout=30).status_code == 401


@pytest.mark.parametrize(
    "order",
    [
        b"",
        b"[]",
        b'{"seconds": 1}',
        b'{"address": 1, "seconds": 1}',
        b'{"address": "http://127.0.0.1:9"}',
        b'{"address": "http://127.0.0.1:9", "seconds": true}',
        b'{"address": "http://127.0.0.1:9", "seconds": 0}',
        b'{"address": "http://127.0.0.1:9", "seconds": 31}',
        b'{"address": "file:///etc", "seconds": 1}',
    ],
)
def test_orders_to_measure_a_link_that_are_none(worker: Any, http: requests.Session, order: bytes) -> None:
    claim(http, worker)
    assert http.post(f"{worker.url}/runs/run-1/measure-link", data=order, headers=AUTH, timeout=30).status_code == 400


def test_a_neighbour_that_is_not_there(start_worker: Callable[..., Any], http: requests.Session) -> None:
    worker = start_worker(link_timeout=0.1)
    claim(http, worker)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        order = {"address": f"http://127.0.0.1:{free.getsockname()[1]}", "seconds": 1}
        reply = http.post(f"{worker.url}/runs/run-1/measure-link", json=order, headers=AUTH, timeout=30)
    assert (reply.status_code, reply.json()["code"]) == (502, "link")
    assert "could not be reached for a probe" in reply.json()["error"]


@pytest.mark.parametrize("query", ["", "?number=", "?number=xyz", "?number=1&wait=-1"])
def test_queries_for_a_profile_that_are_none(worker: Any, http: requests.Session, query: str) -> None:
    claim(http, worker)
    reply = http.post(f"{worker.url}/runs/run-1/profile{query}", headers=AUTH, timeout=30)
    assert (reply.status_code, reply.json()["code"]) == (400, "query")


def test_a_frame_that_is_no_profile_request(worker: Any, http: requests.Session, packet: Any) -> None:
    claim(http, worker)
    url = f"{worker.url}/runs/run-1/profile?number=1"
    wrong = pack_frame({}, {"lightning_accept": "profile request", "message": "{}"})
    for body in (b"", pack_packet(packet()), wrong):
        reply = http.post(url, data=body, headers=AUTH, timeout=30)
        assert (reply.status_code, reply.json()["code"]) == (400, "frame")


def test_the_lease_ends_without_anyone_asking(start_worker: Any, http: requests.Session, deployment: Any) -> None:
    worker = start_worker(lease=0.05)
    claim(http, worker)
    http.post(f"{worker.url}/runs/run-1/deploy", data=pack_deployment(deployment()), headers=AUTH, timeout=30)
    assert worker.stages[0].closed.wait(30)
