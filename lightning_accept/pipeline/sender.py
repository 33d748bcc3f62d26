"""Sends packets from a thread of its own, so that encoding and transfer overlap compute."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_accept.codecs import Codec, CodecError, Payload
from lightning_accept.codecs.cast import raw_payload
from lightning_accept.pipeline.link_meter import LinkMeter
from lightning_accept.pipeline.messages import Kind, Packet, PipelineError, Transfer
from lightning_accept.pipeline.recorder import StageRecorder
from lightning_accept.pipeline.transport import Channel

_LANES = 2
"""Packets that may be under way at a time."""


@dataclass(frozen=True)
class Outgoing:
    """A packet that is still to be encoded.

    Attributes:
        kind: As :attr:`Packet.kind`.
        job: As :attr:`Packet.job`.
        meta: As :attr:`Packet.meta`. ``meta["bits"]`` sets the codec's bit width from this packet on; a new
            ``meta["epoch"]`` tells the codecs that an epoch begins.
        tensors: The tensors; None where there is none.
    """

    kind: Kind
    job: int
    meta: dict[str, Any]
    tensors: Sequence[Tensor | None] = ()


@dataclass
class LinkFigures:
    """What one link has carried so far, in one direction.

    Attributes:
        packets: Number of packets with tensors.
        payload_bytes: Bytes of encoded tensors, framing left out.
        raw_bytes: Bytes that the same tensors take without a codec.
        encode_seconds: Time spent encoding.
        send_seconds: Time spent in transfer, waiting for the receiver's room included.
        last_error: Relative squared quantisation error of the last encoded tensor, if the codec tells.
    """

    packets: int = 0
    payload_bytes: int = 0
    raw_bytes: int = 0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0
    last_error: float | None = None


class _Transit:
    """A packet between the moment when it is encoded and its answer."""

    def __init__(self, outgoing: Outgoing, packet: Packet, started: float, encoded: float) -> None:
        self.outgoing = outgoing
        self.packet = packet
        self.started = started
        self.encoded = encoded
        self.left = threading.Event()
        self.done = threading.Event()


class Sender:
    """One direction of one link.

    Packets leave in the order in which they are put. Where that is allowed, one leaves as soon as the one before it has
    left, whose answer may still be on its way: over a slow link, behind all that travels in the other direction. No
    third one leaves before the first is answered.

    Args:
        name: Describes the link in messages, for example ``link from stage 0 to stage 1``.
        channel: Where packets go.
        codec: For tensors of training packets. One copy per tensor of the cut, since a codec may carry state.
        eval_codec: For tensors of ``evaluate`` packets.
        run: Run of all packets.
        term: Term of all packets.
        recorder: Told when the link is busy.
        peer: Number of the stage at the other end.
        overlap: Whether packets of training jobs may overlap, and so arrive in another order than they were put in; if
            the channel can do that.
        on_error: Called once, from the sender's thread, with what went wrong; nothing is sent after that.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        codec: Codec,
        eval_codec: Codec,
        *,
        run: str,
        term: int,
        recorder: StageRecorder,
        peer: int,
        overlap: bool = False,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self.figures = LinkFigures()
        self.meter = LinkMeter()
        self._name = name
        self._channel = channel
        self._templates = {False: codec, True: eval_codec}
        self._codecs: dict[tuple[bool, int], Codec] = {}
        self._epoch: int | None = None
        self._run = run
        self._term = term
        self._recorder = recorder
        self._peer = peer
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._overlap = overlap and channel.overlaps
        self._lock = threading.Lock()
        self._failed = False
        self._busy_until = 0.0
        self._lane: queue.SimpleQueue[_Transit | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"send: {name}", daemon=True)]
        if self._overlap:
            self._threads += [
                threading.Thread(target=self._drive, name=f"send {lane}: {name}", daemon=True) for lane in range(_LANES)
            ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def put(self, outgoing: Outgoing) -> None:
        """Queue a packet; returns at once."""
        self._queue.put(outgoing)

    def close(self, timeout: float = 5.0) -> None:
        """Drop what is queued, interrupt the transfers in progress and end the threads."""
        self._channel.close()
        self._queue.put(None)
        for thread in self._threads:
            self._lane.put(None)
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout)

    def _work(self) -> None:
        """Encode, and send in turn."""
        under_way: deque[_Transit] = deque()
        while True:
            outgoing = self._queue.get()
            if outgoing is None:
                return
            try:
                started = time.perf_counter()
                packet = self._encode(outgoing)
                transit = _Transit(outgoing, packet, started, time.perf_counter())
            except BaseException as error:
                self._fail(outgoing, error)
                return
            alone = not (self._overlap and outgoing.kind in ("forward", "backward"))
            while len(under_way) > (0 if alone else _LANES - 1):
                under_way.popleft().done.wait()
            if under_way:
                under_way[-1].left.wait()
            if self._failed:
                return
            if alone:
                self._send(transit)
            else:
                under_way.append(transit)
                self._lane.put(transit)

    def _drive(self) -> None:
        """Send what the other thread has encoded."""
        while (transit := self._lane.get()) is not None:
            self._send(transit)

    def _send(self, transit: _Transit) -> None:
        # The channel has a deadline, so whoever waits for these events need not have one.
        try:
            transfer = self._channel.send(transit.packet, transit.left.set)
        except BaseException as error:
            self._fail(transit.outgoing, error)
        else:
            self._account(transit, transfer, time.perf_counter())
        finally:
            transit.left.set()
            transit.done.set()

    def _account(self, transit: _Transit, transfer: Transfer | None, sent: float) -> None:
        outgoing, packet = transit.outgoing, transit.packet
        with self._lock:
            # While the one before was still on the link, this one was not.
            begun, self._busy_until = min(sent, max(transit.encoded, self._busy_until)), sent
            figures = self.figures
            figures.packets += bool(outgoing.tensors)
            figures.payload_bytes += packet.nbytes
            figures.raw_bytes += sum(t.numel() * t.element_size() for t in outgoing.tensors if t is not None)
            figures.encode_seconds += transit.encoded - transit.started
            figures.send_seconds += sent - begun
        if outgoing.tensors:
            self._recorder.crossed("encode", packet, self._peer, transit.started, transit.encoded)
        self._recorder.crossed("send", packet, self._peer, begun, sent)
        if transfer is not None:
            self.meter.add(transfer)

    def _fail(self, outgoing: Outgoing, error: BaseException) -> None:
        """Report the first error; nothing is sent after it."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
        self._on_error(f"sending of {describe(outgoing.kind, outgoing.meta)} over the {self._name}", error)

    def stats(self) -> dict[str, Any]:
        """JSON-able figures of the link, its ``bandwidth`` in bits per second and ``latency`` in seconds included."""
        speed = self.meter.speed
        return {
            **vars(self.figures),
            "peer": self._peer,
            "bandwidth": None if speed is None else speed.bandwidth,
            "latency": None if speed is None else speed.latency,
        }

    def _codec(self, evaluating: bool, index: int) -> Codec:
        """The codec of one tensor of the cut; evaluation has its own, so that it disturbs no state."""
        if (evaluating, index) not in self._codecs:
            self._codecs[evaluating, index] = self._templates[evaluating].fresh()
        return self._codecs[evaluating, index]

    def _encode(self, outgoing: Outgoing) -> Packet:
        evaluating = outgoing.kind == "evaluate"
        if not evaluating and outgoing.meta.get("epoch", self._epoch) != self._epoch:
            self._epoch = outgoing.meta["epoch"]
            for (of_evaluation, _), codec in self._codecs.items():
                if not of_evaluation:
                    codec.start_epoch()
        payloads: list[Payload | None] = []
        for index, tensor in enumerate(outgoing.tensors):
            if tensor is None:
                payloads.append(None)
                continue
            if "random_state" in outgoing.meta and index == len(outgoing.tensors) - 1:
                payloads.append(raw_payload(tensor))
                continue
            codec = self._codec(evaluating, index)
            bits = outgoing.meta.get("bits")
            if bits is not None and codec.bits is not None and codec.bits != bits and not evaluating:
                codec.bits = bits
            try:
                payloads.append(codec.encode(tensor))
            except CodecError as error:
                what = describe(outgoing.kind, outgoing.meta)
                raise PipelineError(f"{self._name}: cannot encode tensor {index} of {what}: {error}") from error
            if not evaluating and codec.last_error is not None:
                self.figures.last_error = codec.last_error
        return Packet(outgoing.kind, self._run, self._term, outgoing.job, outgoing.meta, tuple(payloads))


def describe(kind: str, meta: dict[str, Any]) -> str:
    """A packet in words, for messages."""
    if "batch" not in meta:
        return kind
    micro = f", micro-batch {meta['micro']}" if meta.get("micros", 1) > 1 else ""
    return f"{kind} of batch {meta['batch']}{micro}"
