"""The clients: each packet once and in order whatever gets lost, and errors that say what to do."""

from __future__ import annotations

import http.client
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from lightning_accept.latency.profile import Profile, ProfileStopped
from lightning_accept.latency.submodels import Measurement
from lightning_accept.pipeline.messages import (
    Fault,
    PipelineError,
    QueueFull,
    StageFault,
    TransportError,
    WrongTerm,
)
from lightning_accept.remote import tenancy
from lightning_accept.remote.client import HttpChannel, HttpWorker
from lightning_accept.remote.peer import Peer, Reply


@pytest.fixture
def connect() -> Iterator[Callable[..., HttpWorker]]:
    handles: list[HttpWorker] = []

    def make(url: str, token: str = "secret", **options: Any) -> HttpWorker:
        handles.append(HttpWorker(url, token, **{"timeout": 30.0, **options}))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close()
        handle.release()


@pytest.fixture
def deployed(start_worker: Any, connect: Any, deployment: Any) -> tuple[Any, HttpWorker]:
    worker = start_worker(queue_patience=0.0)
    handle = connect(worker.url)
    handle.claim("run-1", "me", "link")
    handle.deploy(deployment())
    return worker, handle


class LossyProxy:
    """Passes requests on and loses the replies to the first ones of every kind."""

    def __init__(self, port: int, losses: int) -> None:
        lost: dict[tuple[str, str], int] = {}
        self.requests: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                reply = connection.getresponse()
                content = reply.read()
                connection.close()
                key = (self.command, self.path)
                proxy.requests.append(f"{self.command} {self.path}")
                lost[key] = lost.get(key, 0) + 1
                if lost[key] <= losses:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if lost[key] == losses + 1 else content)
                # The first reply that is not lost altogether breaks off in the middle.
                self.close_connection = lost[key] == losses + 1 and bool(content)

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join(30)
        self.server.server_close()


@pytest.fixture
def lossy(start_worker: Any) -> Iterator[tuple[Any, str]]:
    worker = start_worker()
    proxy = LossyProxy(int(worker.url.rsplit(":", 1)[1]), losses=1)
    yield worker, proxy.url
    proxy.stop()


def test_a_packet_goes_down_the_chain_and_another_up(
    start_worker: Any, connect: Any, deployment: Any, packet: Any
) -> None:
    first, last = start_worker(), start_worker()
    handles = [connect(first.url), connect(last.url)]
    for handle in handles:
        handle.claim("run-1", "me", "link")
    handles[1].deploy(deployment(stage=2, stages=3, upstream=first.url))
    handles[0].deploy(deployment(stage=1, stages=3, downstream=last.url))
    for job in range(20):
        handles[0].send(packet(job))
        handles[1].send(packet(job, kind="backward"))
    for job in range(20):
        down = handles[1].receive("down", 30.0)
        up = handles[0].receive("up", 30.0)
        assert (down.kind, down.job, up.kind, up.job) == ("forward", job, "backward", job)
        assert torch.equal(down.payloads[0].tensors["data"], torch.full((4,), float(job)))
    assert handles[0].receive("up", 0.0) is None
    assert last.stages[0].where == last.url


def test_lost_and_broken_replies_cost_nothing(lossy: Any, connect: Any, deployment: Any, packet: Any) -> None:
    worker, url = lossy
    handle = connect(url)
    handle.claim("run-1", "me", "link")
    handle.deploy(deployment())
    for job in range(3):
        handle.send(packet(job))
    assert [handle.receive("down", 30.0).job for _ in range(3)] == [0, 1, 2]
    assert [taken.job for taken in worker.stages[0].taken] == [0, 1, 2]
    assert len(worker.stages) == 1
    assert handle.state(30.0).spec == {"taken": 3}
    assert handle.stats() == {"jobs": 3}
    assert [event.job for event in handle.events(1, 1).events] == [1, 2]
    assert handle.poll(0.0) is None
    handle.release()
    assert worker.stages[0].closed.is_set()


def test_events(deployed: Any, packet: Any, connect: Any, start_worker: Any) -> None:
    _, handle = deployed
    for job in range(3):
        handle.send(packet(job))
    reply = handle.events(1, 2)
    assert ([event.job for event in reply.events], reply.last, reply.term, reply.now) == ([2], 3, 1, 100.0)
    assert 0 <= reply.received - reply.sent <= time.perf_counter() - reply.sent
    assert [event.job for event in handle.events(7, 2).events] == [0, 1, 2]  # of another term: from the beginning
    idle = connect(start_worker().url)
    idle.claim("run-2", "me", "link")
    assert (idle.events(1, 2).events, idle.events(1, 2).term) == ([], 0)


def test_it_is_told_when_a_packet_has_left(deployed: Any, packet: Any) -> None:
    worker, handle = deployed
    told = threading.Event()
    worker.stages[0].before_taking = lambda: told.wait(30)
    handle.send(packet(), told.set)
    assert told.is_set()


def test_back_pressure_is_waited_out(deployed: Any, packet: Any) -> None:
    worker, handle = deployed
    worker.stages[0].refusals = [QueueFull(0.01), QueueFull(0.01)]
    handle.send(packet())
    assert [taken.job for taken in worker.stages[0].taken] == [0]


def test_back_pressure_without_end_is_an_error(deployed: Any, packet: Any) -> None:
    worker, _ = deployed
    worker.stages[0].refusals = [QueueFull(0.01)] * 100_000
    channel = HttpChannel(worker.url, "link", timeout=0.1)
    with pytest.raises(TransportError, match=r"did not take the forward of job 0 within 0.1 s: .*queue full"):
        channel.send(packet())
    channel.close()


def test_receive_returns_none_in_time_and_what_comes_later(deployed: Any, packet: Any) -> None:
    _, handle = deployed
    assert handle.receive("down", 0.01) is None
    sender = threading.Thread(target=handle.send, args=(packet(),))
    sender.start()
    assert handle.receive("down", 30.0).job == 0
    sender.join()


def test_receive_before_and_across_deployments(start_worker: Any, connect: Any, deployment: Any, packet: Any) -> None:
    handle = connect(start_worker().url)
    handle.claim("run-1", "me", "link")
    assert handle.receive("down", 0.01) is None
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.append(handle.receive("down", 30.0)))
    thread.start()
    handle.deploy(deployment())
    handle.deploy(deployment(term=2))
    handle.send(packet(term=2))
    thread.join(30)
    assert [(item.term, item.job) for item in received] == [(2, 0)]


def test_a_fault_reaches_whoever_polls_or_sends(deployed: Any, packet: Any) -> None:
    worker, handle = deployed
    fault = Fault(1, ("echo",), worker.url, "forward of batch 7", "ValueError: no", "the remote traceback")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(handle.poll(30.0)))
    thread.start()
    worker.stages[0].fault = fault
    thread.join(30)
    assert found == [fault]
    with pytest.raises(StageFault, match="the remote traceback"):
        handle.send(packet())


def test_packets_tell_how_fast_they_came(deployed: Any, packet: Any) -> None:
    _, handle = deployed
    sent = handle.send(packet(size=500_000))
    # Without the beginning, of which nobody can tell when it set out.
    assert 1_000_000 < sent.nbytes < 2_001_000
    assert 0 <= sent.round_trip <= sent.seconds
    received = handle.receive("down", 30.0).transfer
    assert 1_990_000 < received.nbytes < 2_001_000
    assert received.seconds > 0
    assert received.round_trip == 0.0


def test_waiting_for_room_is_no_time_on_the_link(
    start_worker: Any, connect: Any, deployment: Any, packet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(queue_patience=30.0)
    handle = connect(worker.url)
    handle.claim("run-1", "me", "link")
    handle.deploy(deployment())
    replies: list[Reply] = []
    attempt = Peer._attempt

    def spy(self: Peer, *arguments: Any) -> Reply:
        replies.append(attempt(self, *arguments))
        return replies[-1]

    monkeypatch.setattr(Peer, "_attempt", spy)
    worker.stages[0].refusals = [QueueFull(0.5)]
    transfer = handle.send(packet(size=500_000))
    assert replies[-1].seconds >= 0.5
    passed = float(replies[-1].headers["X-Accept-Passed"].split()[1])
    assert transfer.seconds == pytest.approx(passed + transfer.round_trip)
    assert passed <= replies[-1].seconds - 0.5


def test_a_profile(deployed: Any, profile_request: Any) -> None:
    _, handle = deployed
    profile = handle.profile(profile_request, 300.0)
    assert [measured.span for measured in profile.measured] == list(profile_request.spans)
    assert all(measured.possible for measured in profile.measured)


def test_a_profile_whose_reply_is_lost_is_measured_once(
    lossy: Any, connect: Any, profile_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = lossy
    measured: list[Any] = []

    def measure(request: Any, *arguments: Any, **options: Any) -> Profile:
        measured.append(request)
        return Profile((Measurement(0, 1, 1.0, math.inf),))

    monkeypatch.setattr(tenancy, "run_profile", measure)
    handle = connect(url)
    handle.claim("run-1", "me", "link")
    for count in (1, 2):
        assert handle.profile(profile_request, 30.0).measured == (Measurement(0, 1, 1.0, math.inf),)
        assert len(measured) == count
    assert measured[0].spans == profile_request.spans


def test_a_profile_has_a_deadline_and_ends_with_the_run(
    start_worker: Any, connect: Any, profile_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def measure(request: Any, device: Any, stop: Callable[[], bool]) -> Profile:
        begun.set()
        while not stop():
            pass
        raise ProfileStopped("stopped")

    monkeypatch.setattr(tenancy, "run_profile", measure)
    handle = connect(start_worker().url)
    handle.claim("run-1", "me", "link")
    with pytest.raises(TransportError, match=r"the profile request: measuring took longer than 0.05 s"):
        handle.profile(profile_request, 0.05)
    begun.clear()
    errors: list[Exception] = []

    def call() -> None:
        try:
            handle.profile(profile_request, 300.0)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(30)
    handle.release()
    thread.join(30)
    assert not thread.is_alive()
    assert "lost to this run" in str(errors[0])


def test_a_profile_keeps_the_lease(
    start_worker: Any, connect: Any, profile_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    begun, over = threading.Event(), threading.Event()

    def measure(*arguments: Any, **options: Any) -> Profile:
        begun.set()
        assert over.wait(30)
        return Profile(())

    monkeypatch.setattr(tenancy, "run_profile", measure)
    worker = start_worker(clock=lambda: now[0], lease=60.0)
    handle = connect(worker.url)
    handle.claim("run-1", "me", "link")
    thread = threading.Thread(target=handle.profile, args=(profile_request, 300.0))
    thread.start()
    assert begun.wait(30)
    now[0] = 1000.0
    with pytest.raises(PipelineError, match="is busy: held by me"):
        connect(worker.url).claim("run-2", "you", "link")
    over.set()
    thread.join(30)
    assert handle.poll(0.0) is None


def test_a_profile_that_fails_names_the_reason(
    deployed: Any, profile_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: Any, **options: Any) -> Profile:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(tenancy, "run_profile", measure)
    with pytest.raises(PipelineError, match="refused the profile request: measuring failed: RuntimeError: no such ker"):
        deployed[1].profile(profile_request, 30.0)


def test_close_interrupts_calls_in_progress(deployed: Any) -> None:
    _, handle = deployed
    errors: list[Any] = []

    def call(function: Callable[[], Any]) -> None:
        try:
            function()
        except TransportError as error:
            errors.append(error)

    calls = [lambda: handle.receive("down", 300.0), lambda: handle.receive("up", 300.0), lambda: handle.poll(300.0)]
    threads = [threading.Thread(target=call, args=(function,)) for function in calls]
    for thread in threads:
        thread.start()
    handle.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(errors) == 3
    with pytest.raises(TransportError, match="closed from this side"):
        handle.stats()


def test_release_works_after_close_and_twice(deployed: Any) -> None:
    worker, handle = deployed
    handle.close()
    handle.release()
    handle.release()
    assert worker.stages[0].closed.is_set()


def test_release_never_raises(connect: Any, start_worker: Any) -> None:
    worker = start_worker()
    handle = connect(worker.url)
    handle.claim("run-1", "me", "link")
    worker.stop()
    handle.release()


def test_claim_tells_the_facts(start_worker: Any, connect: Any) -> None:
    facts = connect(start_worker(threads=3).url).claim("run-1", "me", "link")
    assert {"version", "device", "threads", "memory_total", "lease", "max_body"} <= set(facts)
    assert facts["threads"] == 3


def test_a_wrong_token_names_the_worker_and_the_cure(start_worker: Any, connect: Any) -> None:
    worker = start_worker()
    with pytest.raises(
        PipelineError, match=rf"{worker.url} refused the claim: the bearer token is wrong; check token="
    ) as e:
        connect(worker.url, token="wrong").claim("run-1", "me", "link")
    assert "secret" not in str(e.value)


def test_a_busy_worker_names_its_holder(deployed: Any, connect: Any) -> None:
    worker, _ = deployed
    with pytest.raises(PipelineError, match=rf"{worker.url} is busy: held by me \(run run-1\) since \d{{4}}-"):
        connect(worker.url).claim("run-2", "someone else", "link")


def test_a_worker_that_is_not_there(connect: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(TransportError, match=rf"127.0.0.1:{port} could not be reached.*--port {port}") as error:
            connect(f"http://127.0.0.1:{port}", timeout=0.1).claim("run-1", "me", "link")
    assert "object at" not in str(error.value)


def test_a_run_that_the_worker_no_longer_knows(deployed: Any, connect: Any) -> None:
    worker, handle = deployed
    connect(worker.url)._farewell.request("DELETE", "/runs/run-1", "the release")
    with pytest.raises(TransportError, match=r"lost to this run.*its central node gave it back"):
        handle.poll(0.0)


def test_refusals_of_a_stage_and_of_a_packet(start_worker: Any, connect: Any, deployment: Any, packet: Any) -> None:
    handle = connect(start_worker().url)
    handle.claim("run-1", "me", "link")
    with pytest.raises(PipelineError, match="stage 1 was refused: no such op"):
        handle.deploy(deployment(spec={"refuse": "no such op"}))
    with pytest.raises(StageFault, match="KeyError: 'oops'"):
        handle.deploy(deployment(term=2, spec={"break": "oops"}))
    handle.deploy(deployment(term=3, spec={"slow": True}))
    with pytest.raises(WrongTerm):
        handle.send(packet(term=2))
    with pytest.raises(TransportError, match="the stage is slow"):
        handle.state(0.0)


@pytest.mark.parametrize("known", [True, False])
def test_a_body_over_the_workers_limit(start_worker: Any, connect: Any, deployment: Any, known: bool) -> None:
    handle = connect(start_worker(max_body=5000).url)
    handle.claim("run-1", "me", "link")
    if not known:
        handle._max_body = None
    with pytest.raises(PipelineError, match=r"\b2000\d{4} bytes.*\b5000 bytes.*--max-body"):
        handle.deploy(deployment(tensors={"weight": torch.zeros(5_000_000)}))


def test_something_else_listens_there(connect: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with pytest.raises(PipelineError, match="status 404, not as a worker does; check that the URL"):
            connect(f"http://127.0.0.1:{server.server_address[1]}").claim("run-1", "me", "link")
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


def test_proxies_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, start_worker: Any, connect: Any, deployment: Any, packet: Any
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    handle = connect(start_worker().url)
    handle.claim("run-1", "me", "link")
    handle.deploy(deployment())
    handle.send(packet())
    assert handle.receive("down", 30.0).job == 0


@pytest.mark.parametrize(
    "url", ["", "pi-1:7070", "ftp://pi-1:7070", "http://", "http://pi-1:99999", "http://u:p@pi-1:1", "http://pi-1/?a=b"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not the URL of a worker; it looks like http://"):
        HttpWorker(url, "secret")


def test_arguments_that_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"token=\.\.\. must hold one word"):
        HttpWorker("http://pi-1:7070", "two words\n")
    with pytest.raises(ValueError, match=r"cafile='nowhere.pem' is not a file"):
        HttpWorker("http://pi-1:7070", "secret", cafile="nowhere.pem")
