"""The central node's handle on a worker over HTTP, and a worker's channel to its neighbour."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_accept.latency.profile import Profile
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.events import EventReply, events_from_json
from lightning_accept.pipeline.messages import (
    Deployment,
    Direction,
    Fault,
    Packet,
    PipelineError,
    StageState,
    Transfer,
    TransportError,
    WrongTerm,
)
from lightning_accept.remote.fetcher import Fetcher
from lightning_accept.remote.handover import request_handover
from lightning_accept.remote.http_probe import longest, probe_back, probe_there
from lightning_accept.remote.interrupt import Interrupter
from lightning_accept.remote.packet_sender import PacketSender, describe, run_path
from lightning_accept.remote.peer import Peer, Reply, check_url
from lightning_accept.remote.probe import LONGEST_PROBE
from lightning_accept.remote.window import Window
from lightning_accept.remote.wire import (
    ITEM_HEADER,
    PROTOCOL,
    WireError,
    fault_from_json,
    pack_deployment,
    pack_packet,
    pack_profile_request,
    speed_from_json,
    unpack_packet,
    unpack_state,
)

_LONGEST_POLL = 10.0
"""Seconds that one request waits on the worker; a dead connection is noticed this much later."""
_CLAIM_TIMEOUT = 10.0
_RELEASE_TIMEOUT = 2.0


class HttpChannel:
    """A :class:`~lightning_accept.pipeline.transport.Channel` to the worker at ``url``.

    Args:
        url: The worker's URL.
        token: The worker's token, or the run's link token.
        timeout: Seconds after which a packet that was not taken is given up.
        cafile: Certificates against which the worker's is checked; None for the system's.
    """

    overlaps = True

    def __init__(self, url: str, token: str, *, timeout: float = 60.0, cafile: str | None = None) -> None:
        self._interrupter = Interrupter()
        self._sender = PacketSender(
            lambda: Peer(url, token, timeout=timeout, cafile=cafile, interrupter=self._interrupter)
        )

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer:
        """See :meth:`lightning_accept.pipeline.transport.Channel.send`."""
        return self._sender.send(packet, pack_packet(packet), on_left)

    def close(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.close`."""
        self._interrupter.interrupt()
        self._sender.close()


class HttpWorker:
    """A :class:`~lightning_accept.pipeline.transport.WorkerHandle` over HTTP.

    Sending, receiving in either direction, polling and control have connections of their own and may go on in parallel.

    Args:
        url: The worker's URL.
        token: The worker's token.
        timeout: Seconds for which lost requests are repeated before the worker counts as lost.
        cafile: Certificates against which the worker's is checked; None for the system's.

    Raises:
        ValueError: If ``url``, ``token`` or ``cafile`` cannot be one.
    """

    def __init__(self, url: str, token: str, *, timeout: float = 60.0, cafile: str | None = None) -> None:
        self.name = self.address = check_url(url)
        self._interrupter = Interrupter()
        window = Window()

        def new_peer(interrupter: Interrupter | None = None) -> Peer:
            own = interrupter or self._interrupter
            return Peer(url, token, timeout=timeout, cafile=cafile, interrupter=own, window=window)

        # Activations, gradients and step requests are sent by threads of their own.
        self._sending = {kind: PacketSender(new_peer, window) for kind in ("down", "up", "step")}
        self._receiving: dict[Direction, Fetcher] = {
            "up": Fetcher(new_peer, "up", window),
            "down": Fetcher(new_peer, "down", window),
        }
        self._polling = new_peer()
        self._control = new_peer()
        self._control_lock = threading.Lock()
        # Measuring takes long, and the figures may be wanted meanwhile.
        self._measuring = new_peer()
        self._measuring_lock = threading.Lock()
        # Works after close() too.
        self._farewell = new_peer(Interrupter())
        self._timeout = timeout
        self._run = ""
        self._max_body: int | None = None
        self._terms = threading.Condition()
        self._term: int | None = None
        self._next_term = -1
        self._received: dict[Direction, int] = {"up": 0, "down": 0}

    def claim(self, run: str, holder: str, link_token: str) -> dict[str, Any]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.claim`."""
        body = json.dumps({"run": run, "holder": holder, "link_token": link_token}).encode()
        with self._control_lock:
            reply = self._control.request(
                "POST", "/runs", "the claim", body=body, timeout=min(self._timeout, _CLAIM_TIMEOUT)
            )
        facts = self._json(reply.body)
        if facts.get("protocol") != PROTOCOL:
            raise PipelineError(
                f"worker {self.name} runs version {facts.get('version')} (protocol {facts.get('protocol')}), here it is"
                f" protocol {PROTOCOL}; install the same version of lightning-accept on both"
            )
        self._run = run
        self._max_body = facts.get("max_body")
        return facts

    def deploy(self, deployment: Deployment, timeout: float | None = None) -> int:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.deploy`."""
        body = pack_deployment(deployment)
        self._check_size(f"stage {deployment.stage}", body)
        with self._terms:
            self._next_term = deployment.term
        with self._control_lock:
            # Building a stage takes its time, so the worker's silence is no sign of a loss.
            reply = self._control.request(
                "POST",
                f"{run_path(self._run)}/deploy",
                f"stage {deployment.stage}",
                body=body,
                wait=self._timeout if timeout is None else timeout,
            )
        fetched = self._json(reply.body).get("fetched")
        if not isinstance(fetched, int):
            raise PipelineError(f"worker {self.name} does not answer a deployment as a worker does")
        with self._terms:
            self._term = deployment.term
            self._received = {"up": 0, "down": 0}
            self._terms.notify_all()
        return fetched

    def handover(self, term: int, names: Sequence[str], timeout: float) -> StageState:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.handover`."""
        with self._control_lock:
            return request_handover(self._control, self._run, term, names, timeout)

    def forget(self, term: int) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.forget`."""
        with self._control_lock:
            self._control.request(
                "POST", f"{run_path(self._run)}/forget", "the end of its earlier stage", query={"term": str(term)}
            )

    def profile(self, request: ProfileRequest, timeout: float) -> Profile:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.profile`."""
        body = pack_profile_request(request)
        self._check_size("the profile request", body)
        # A lost reply is asked for again by the same number, so that nothing is measured twice.
        query = {"number": secrets.token_hex(8), "wait": f"{timeout:.3f}"}
        with self._measuring_lock:
            reply = self._measuring.request(
                "POST", f"{run_path(self._run)}/profile", "the profile request", query=query, body=body, wait=timeout
            )
        try:
            return Profile.from_json(self._json(reply.body))
        except ValueError as error:
            raise PipelineError(f"worker {self.name} sent something that is not a profile: {error}") from error

    def measure_link(self, seconds: float) -> tuple[Speed, Speed]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.measure_link`."""
        seconds = min(seconds, LONGEST_PROBE)
        with self._measuring_lock:
            there = probe_there(self._measuring, self._run, seconds)
            return there, probe_back(self._measuring, self._run, seconds)

    def measure_link_to(self, address: str, seconds: float) -> Speed:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.measure_link_to`."""
        seconds = min(seconds, LONGEST_PROBE)
        body = json.dumps({"address": address, "seconds": seconds}).encode()
        what = f"the measuring of its link to {address}"
        with self._measuring_lock:
            reply = self._measuring.request(
                "POST", f"{run_path(self._run)}/measure-link", what, body=body, wait=longest(seconds) + self._timeout
            )
        try:
            return speed_from_json(self._json(reply.body))
        except WireError as error:
            raise PipelineError(f"worker {self.name}, {what}: {error}") from error

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer:
        """See :meth:`lightning_accept.pipeline.transport.Channel.send`."""
        body = pack_packet(packet)
        self._check_size(describe(packet), body)
        return self._sending["step" if packet.kind == "step" else packet.direction].send(packet, body, on_left)

    def receive(self, direction: Direction, timeout: float) -> Packet | None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.receive`."""
        deadline = time.monotonic() + timeout
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            with self._terms:
                if not self._terms.wait_for(
                    lambda: self._interrupter.interrupted or self._term == self._next_term, remaining
                ):
                    return None
                term, after = self._term, self._received[direction]
            if self._interrupter.interrupted:
                raise TransportError(f"receiving from {self.name} was interrupted")
            wait = min(max(0.0, deadline - time.monotonic()), _LONGEST_POLL)
            try:
                assert term is not None
                reply = self._receiving[direction].fetch(self._run, term, after, wait)
            except WrongTerm:
                with self._terms:
                    if self._next_term == term:
                        raise
                # A deployment is under way, and with it the next term.
                continue
            if reply.status != 204:
                return self._accept(direction, term, after, reply)
            if time.monotonic() >= deadline:
                return None

    def _accept(self, direction: Direction, term: int | None, after: int, reply: Reply) -> Packet:
        number = reply.headers.get(ITEM_HEADER)
        if number != str(after + 1):
            raise PipelineError(f"worker {self.name} sent item {number} instead of {after + 1}")
        try:
            packet = unpack_packet(reply.body)
        except WireError as error:
            raise PipelineError(f"worker {self.name} sent something that is not a packet: {error}") from error
        with self._terms:
            if self._term == term:
                self._received[direction] = after + 1
        return replace(packet, transfer=reply.transfer)

    def state(self, timeout: float) -> StageState:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.state`."""
        with self._control_lock:
            reply = self._control.request(
                "GET", f"{run_path(self._run)}/state", "its state", query={"wait": f"{timeout:.3f}"}, wait=timeout
            )
        try:
            return unpack_state(reply.body)
        except WireError as error:
            raise PipelineError(f"worker {self.name} sent something that is not a state: {error}") from error

    def poll(self, timeout: float) -> Fault | None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.poll`."""
        deadline = time.monotonic() + timeout
        while True:
            wait = min(max(0.0, deadline - time.monotonic()), _LONGEST_POLL)
            reply = self._polling.request(
                "GET", f"{run_path(self._run)}/poll", "the poll", query={"wait": f"{wait:.3f}"}, wait=wait
            )
            fault = self._json(reply.body).get("fault")
            if fault is not None:
                try:
                    return fault_from_json(fault)
                except WireError as error:
                    raise PipelineError(f"worker {self.name} reports a fault that cannot be read: {error}") from error
            if time.monotonic() >= deadline:
                return None

    def stats(self) -> dict[str, Any]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.stats`."""
        with self._control_lock:
            return self._json(self._control.request("GET", f"{run_path(self._run)}/stats", "its figures").body)

    def events(self, term: int, after: int) -> EventReply:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.events`."""
        query = {"term": str(term), "after": str(after)}
        with self._control_lock:
            reply = self._control.request("GET", f"{run_path(self._run)}/events", "its events", query=query)
            received = time.perf_counter()
        try:
            return events_from_json(self._json(reply.body), received - reply.seconds, received)
        except ValueError as error:
            raise PipelineError(f"worker {self.name} sent something that is no list of events: {error}") from error

    def close(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.close`."""
        self._interrupter.interrupt()
        with self._terms:
            self._terms.notify_all()
        for sender in self._sending.values():
            sender.close()
        for fetcher in self._receiving.values():
            fetcher.close()
        for peer in (self._polling, self._control, self._measuring):
            peer.close()

    def release(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.release`."""
        run, self._run = self._run, ""
        if run:
            try:
                self._farewell.request("DELETE", run_path(run), "the release", timeout=_RELEASE_TIMEOUT)
            except PipelineError:
                # Its lease will end.
                return
            finally:
                self._farewell.close()

    def _check_size(self, what: str, body: bytes) -> None:
        # The worker would refuse it too, but over a slow link its refusal can get lost behind the upload.
        if self._max_body is not None and len(body) > self._max_body:
            raise PipelineError(
                f"{what} takes {len(body)} bytes, worker {self.name} accepts {self._max_body} bytes; start it with a"
                " larger --max-body"
            )

    def _json(self, body: memoryview) -> dict[str, Any]:
        try:
            content = json.loads(bytes(body))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise PipelineError(f"{self.name} does not answer as a worker does; check the URL")
        return content
