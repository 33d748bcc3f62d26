"""The central node's handle on a worker over HTTP, and a worker's channel to its neighbour."""

from __future__ import annotations

import json
import threading
import time
from typing import Any
from urllib.parse import quote

from lightning_accept.pipeline.messages import (
    Deployment,
    Direction,
    Fault,
    Packet,
    PipelineError,
    StageState,
    TransportError,
    WrongTerm,
)
from lightning_accept.remote.interrupt import Interrupter
from lightning_accept.remote.peer import Peer, check_url
from lightning_accept.remote.wire import (
    ITEM_HEADER,
    PROTOCOL,
    WireError,
    fault_from_json,
    pack_deployment,
    pack_packet,
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

    def __init__(self, url: str, token: str, *, timeout: float = 60.0, cafile: str | None = None) -> None:
        self._interrupter = Interrupter()
        self._peer = Peer(url, token, timeout=timeout, cafile=cafile, interrupter=self._interrupter)

    def send(self, packet: Packet) -> None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.send`."""
        self._peer.request(*_packet_request(packet), body=pack_packet(packet))

    def close(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.close`."""
        self._interrupter.interrupt()
        self._peer.close()


def _packet_request(packet: Packet) -> tuple[str, str, str]:
    return "POST", f"{_path(packet.run)}/packets", f"the {packet.kind} of job {packet.job}"


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

        def new_peer(interrupter: Interrupter) -> Peer:
            return Peer(url, token, timeout=timeout, cafile=cafile, interrupter=interrupter)

        # Activations, gradients and step requests are sent by threads of their own.
        self._sending = {kind: new_peer(self._interrupter) for kind in ("down", "up", "step")}
        self._receiving: dict[Direction, Peer] = {
            "up": new_peer(self._interrupter),
            "down": new_peer(self._interrupter),
        }
        self._polling = new_peer(self._interrupter)
        self._control = new_peer(self._interrupter)
        self._control_lock = threading.Lock()
        # Works after close() too.
        self._farewell = new_peer(Interrupter())
        self._timeout = timeout
        self._run = ""
        self._max_body: int | None = None
        self._terms = threading.Condition()
        self._term: int | None = None
        self._next_term = -1
        self._received: dict[Direction, int] = {"up": 0, "down": 0}

    def claim(self, run: str, holder: str) -> dict[str, Any]:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.claim`."""
        body = json.dumps({"run": run, "holder": holder}).encode()
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

    def deploy(self, deployment: Deployment) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.deploy`."""
        body = pack_deployment(deployment)
        self._check_size(f"stage {deployment.stage}", body)
        with self._terms:
            self._next_term = deployment.term
        with self._control_lock:
            # Building a stage takes its time, so the worker's silence is no sign of a loss.
            self._control.request(
                "POST", f"{_path(self._run)}/deploy", f"stage {deployment.stage}", body=body, wait=self._timeout
            )
        with self._terms:
            self._term = deployment.term
            self._received = {"up": 0, "down": 0}
            self._terms.notify_all()

    def send(self, packet: Packet) -> None:
        """See :meth:`lightning_accept.pipeline.transport.Channel.send`."""
        body = pack_packet(packet)
        method, path, what = _packet_request(packet)
        self._check_size(what, body)
        self._sending["step" if packet.kind == "step" else packet.direction].request(method, path, what, body=body)

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
                reply = self._receiving[direction].request(
                    "GET",
                    f"{_path(self._run)}/outbox/{direction}",
                    f"the packets that go {direction}",
                    query={"term": str(term), "after": str(after), "wait": f"{wait:.3f}"},
                    wait=wait,
                )
            except WrongTerm:
                with self._terms:
                    if self._next_term == term:
                        raise
                # A deployment is under way, and with it the next term.
                continue
            if reply.status != 204:
                return self._accept(direction, term, after, reply.headers.get(ITEM_HEADER), reply.body)
            if time.monotonic() >= deadline:
                return None

    def _accept(
        self, direction: Direction, term: int | None, after: int, number: str | None, frame: memoryview
    ) -> Packet:
        if number != str(after + 1):
            raise PipelineError(f"worker {self.name} sent item {number} instead of {after + 1}")
        try:
            packet = unpack_packet(frame)
        except WireError as error:
            raise PipelineError(f"worker {self.name} sent something that is not a packet: {error}") from error
        with self._terms:
            if self._term == term:
                self._received[direction] = after + 1
        return packet

    def state(self, timeout: float) -> StageState:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.state`."""
        with self._control_lock:
            reply = self._control.request(
                "GET", f"{_path(self._run)}/state", "its state", query={"wait": f"{timeout:.3f}"}, wait=timeout
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
                "GET", f"{_path(self._run)}/poll", "the poll", query={"wait": f"{wait:.3f}"}, wait=wait
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
            return self._json(self._control.request("GET", f"{_path(self._run)}/stats", "its figures").body)

    def close(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.close`."""
        self._interrupter.interrupt()
        with self._terms:
            self._terms.notify_all()
        peers = (*self._sending.values(), *self._receiving.values(), self._polling, self._control)
        for peer in peers:
            peer.close()

    def release(self) -> None:
        """See :meth:`lightning_accept.pipeline.transport.WorkerHandle.release`."""
        run, self._run = self._run, ""
        if run:
            try:
                self._farewell.request("DELETE", _path(run), "the release", timeout=_RELEASE_TIMEOUT)
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


def _path(run: str) -> str:
    return f"/runs/{quote(run, safe='')}"
