"""StageRunner: one stage at work on a worker, between its two neighbours."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accept.codecs import Codec, CodecError, codec_from_config, decode
from lightning_accept.graph import StageModule, StageProgram
from lightning_accept.latency.memory import process_bytes
from lightning_accept.pipeline import optimizers as optim
from lightning_accept.pipeline.buffer_history import BufferHistory
from lightning_accept.pipeline.clipping import clip_stage, squares_in, stage_squares
from lightning_accept.pipeline.events import EventLog, events_to_json
from lightning_accept.pipeline.messages import (
    Deployment,
    Fault,
    Packet,
    QueueFull,
    StageFault,
    StageReport,
    StageState,
    WrongTerm,
)
from lightning_accept.pipeline.order import OneForwardOneBackward
from lightning_accept.pipeline.random_state import borrowed_random_state
from lightning_accept.pipeline.recorder import StageRecorder
from lightning_accept.pipeline.sender import Outgoing, Sender, describe
from lightning_accept.pipeline.stage import Job, StageExecutor
from lightning_accept.pipeline.transport import Channel

log = logging.getLogger("lightning_accept")

T = TypeVar("T")
_SEEN_KEPT = 4096


class StageRunner:
    """Holds one stage and works through its packets in an order fixed by the schedule.

    One thread computes, two send. :meth:`deliver` decodes in the thread that received.

    Args:
        deployment: The stage.
        device: Where to compute.
        upstream: Channel to the previous stage.
        downstream: Channel to the next stage, or back to the central node.
        where: This worker's URL, for messages.
        allowed_optimizers: Optimizer classes beyond ``torch.optim``.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        device: torch.device,
        upstream: Channel,
        downstream: Channel,
        where: str,
        allowed_optimizers: Mapping[str, type[Optimizer]] | None = None,
    ) -> None:
        spec = deployment.spec
        self._deployment = deployment
        self._where = where
        self._device = device
        tensors = deployment.tensors
        program = StageProgram.from_json(spec["program"])
        parts = {prefix: _section(tensors, prefix, device) for prefix in ("param", "buffer", "const")}
        module = StageModule(program, parts["param"], parts["buffer"], parts["const"], device)
        self._layers = tuple(program.layers)
        optimizers = [optim.rebuild(entry, module.parameters, allowed_optimizers or {}) for entry in spec["optimizers"]]
        window = spec["window"]
        changing = [] if window is None else program.changing_buffers()
        self._executor = StageExecutor(
            module,
            optimizers,
            weight_prediction=spec["weight_prediction"],
            scale_lr=spec["scale_lr"],
            seed=spec["seed"],
            stage=deployment.stage,
            history=BufferHistory({name: module.buffers[name] for name in changing}),
        )
        self._executor.restore_optimizers(spec["optimizer_state"], tensors)
        self._executor.restore_gradients(_section(tensors, "grad", device))
        self._order = None if window is None else OneForwardOneBackward(window)
        self._queue_limit: int = spec["queue_limit"]
        self._lock = threading.Condition()
        self._arrived: dict[tuple[str, int], tuple[Packet, list[Tensor | None]]] = {}
        self._free: deque[tuple[Packet, list[Tensor | None]]] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._seen: dict[str, set[int]] = {}
        self._fault: Fault | None = None
        self._closed = False
        self._recorder = StageRecorder(EventLog(), deployment.stage, deployment.term)
        codecs = {name: codec_from_config(config) for name, config in spec["codecs"].items()}
        for codec in codecs.values():
            codec.prepare()
        stage, after = deployment.stage, (deployment.stage + 1) % deployment.stages
        self._up = self._make_sender(stage - 1, upstream, codecs["backward"], codecs["evaluate"])
        self._down = self._make_sender(after, downstream, codecs["forward"], codecs["evaluate"])
        self._thread = threading.Thread(target=self._work, name=f"stage {deployment.stage}", daemon=True)

    # ----- what the daemon calls

    def start(self) -> None:
        """Start the threads."""
        self._up.start()
        self._down.start()
        self._thread.start()

    def deliver(self, packet: Packet) -> None:
        """Take a packet; see :meth:`lightning_accept.pipeline.transport.StageHost.deliver`."""
        if (packet.run, packet.term) != (self._deployment.run, self._deployment.term):
            raise WrongTerm(
                f"stage {self._deployment.stage} on {self._where} serves run {self._deployment.run} in term"
                f" {self._deployment.term}, not run {packet.run} in term {packet.term}"
            )
        key = (packet.kind, packet.job)
        with self._lock:
            self._check()
            if packet.job in self._seen.setdefault(packet.kind, set()):
                return
            # What comes next is always taken: later packets may have overtaken it and filled the queue.
            if packet.kind in ("forward", "evaluate") and self._is_full() and not self._is_next(key):
                raise QueueFull
        tensors = self._decode(packet)
        with self._lock:
            seen = self._seen[packet.kind]
            if packet.job in seen:
                return
            if packet.kind == "flush" and self._order is not None:
                self._order.flush(packet.job)
            elif self._order is not None and packet.kind in ("forward", "backward"):
                self._arrived[key] = (packet, tensors)
            else:
                self._free.append((packet, tensors))
            seen.add(packet.job)
            if len(seen) > _SEEN_KEPT:
                self._seen[packet.kind] = {job for job in seen if job > packet.job - _SEEN_KEPT // 2}
            self._lock.notify_all()
        if packet.kind == "flush":
            self._down.put(Outgoing("flush", packet.job, packet.meta))

    def state(self, timeout: float) -> StageState:
        """Gather the stage's state; see :class:`lightning_accept.pipeline.transport.StageHost`."""

        def gather() -> StageState:
            spec, tensors = self._executor.gather()
            return StageState(spec, {name: t.to("cpu", copy=True) for name, t in tensors.items()})

        return self._command(gather, timeout, "gather its state")

    def handover(self, names: Sequence[str] | None, timeout: float) -> StageState:
        """Hand a part of the state over; see :class:`lightning_accept.pipeline.transport.StageHost`."""

        def hand_over() -> StageState:
            state = self._executor.hand_over(names)
            if names is None:
                return state
            return StageState(state.spec, {name: t.to("cpu", copy=True) for name, t in state.tensors.items()})

        return self._command(hand_over, timeout, "hand its layers over")

    def stats(self) -> dict[str, Any]:
        """JSON-able figures of this stage and its links."""
        with self._lock:
            waiting = self._waiting_jobs()
        return {
            "stage": self._deployment.stage,
            "layers": list(self._layers),
            "term": self._deployment.term,
            "updates": self._executor.updates_done,
            "outstanding": len(self._executor.outstanding),
            "queued": waiting,
            "memory": process_bytes(self._device),
            **self._recorder.stats(),
            "links": {"up": self._up.stats(), "down": self._down.stats()},
        }

    def events(self, term: int, after: int) -> dict[str, Any]:
        """What happened; see :class:`lightning_accept.pipeline.transport.StageHost`."""
        own = self._deployment.term
        events, last = self._recorder.log.since(after if term == own else 0)
        return events_to_json(events, last, time.perf_counter(), self._deployment.stage, own)

    @property
    def fault(self) -> Fault | None:
        """Why the stage stopped, or None."""
        return self._fault

    def close(self) -> None:
        """End all threads. Idempotent."""
        with self._lock:
            self._closed = True
            commands, self._commands = list(self._commands), deque()
            self._lock.notify_all()
        for _, future in commands:
            future.cancel()
        self._up.close()
        self._down.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    # ----- the compute thread

    def _work(self) -> None:
        while True:
            started = time.perf_counter()
            with self._lock:
                while (task := self._next_task()) is None and not self._closed and self._fault is None:
                    self._lock.wait()
                if self._closed or self._fault is not None or task is None:
                    return
            self._recorder.figures.waiting_seconds += time.perf_counter() - started
            doing, action = task
            try:
                action()
            except BaseException as error:
                self._fail(doing, error)
                return

    def _next_task(self) -> tuple[str, Callable[[], None]] | None:
        if self._free:
            packet, tensors = self._free.popleft()
            return describe(packet.kind, packet.meta), lambda: self._process(packet, tensors)
        if self._order is not None:
            action = self._order.next()
            entry = self._arrived.pop(action, None)
            if entry is not None:
                self._order.done(action)
                return describe(entry[0].kind, entry[0].meta), lambda: self._process(*entry)
        # Commands come last: a state that is asked for includes all that was accepted before.
        if self._commands:
            function, future = self._commands.popleft()
            return "command", lambda: _run_command(function, future)
        return None

    def _process(self, packet: Packet, tensors: list[Tensor | None]) -> None:
        if packet.kind == "forward":
            self._forward(packet, tensors)
        elif packet.kind == "backward":
            self._backward(packet, tensors)
        elif packet.kind == "evaluate":
            started = self._now()
            outputs = self._executor.run(_present(tensors), packet.meta["training"], packet.meta.get("autocast"))
            self._recorder.computed("evaluate", packet.job, started, self._now())
            self._down.put(Outgoing("evaluate", packet.job, packet.meta, outputs))
        elif packet.kind == "step":
            self._zero_gradients(packet)
            self._step(packet.meta["update"], -1, keep_gradients=True)

    def _forward(self, packet: Packet, tensors: list[Tensor | None]) -> None:
        meta = packet.meta
        if meta.get("empty"):
            self._down.put(Outgoing("forward", packet.job, meta))
            return
        started, updates = self._now(), self._executor.updates_done
        with borrowed_random_state(tensors, "random_state" in meta) as state:
            outputs, needs_grad = self._executor.forward(
                _job(packet), _present(state.tensors), meta["needs_grad"], meta.get("autocast")
            )
            state.returned = outputs
        self._recorder.forwarded(packet.job, meta["batch"], meta["micro"], started, self._now(), updates)
        self._down.put(Outgoing("forward", packet.job, {**meta, "needs_grad": needs_grad}, state.returned))

    def _backward(self, packet: Packet, tensors: list[Tensor | None]) -> None:
        meta = packet.meta
        started = self._now()
        self._zero_gradients(packet)
        gradients: list[Tensor | None] = []
        if meta.get("skip") and not meta.get("empty"):
            self._executor.skip(packet.job, undo="undo" in meta)
        elif not meta.get("empty"):
            gradients = self._executor.backward(packet.job, tensors)
        meta = self._clip(meta)
        ended, updates = self._now(), self._executor.updates_done
        forward_seconds = None
        if meta.get("skip"):
            self._recorder.skipped(packet.job)
        else:
            forward_seconds = self._recorder.backwarded(
                packet.job, meta["batch"], meta.get("micro", 0), started, ended, updates
            )
        if forward_seconds is not None:
            report = StageReport(
                forward_seconds,
                ended - started,
                self._recorder.last_step,
                self._down.meter.bandwidth,
                self._up.meter.bandwidth,
            )
            meta = {**meta, "times": {**meta.get("times", {}), str(self._deployment.stage): report.to_json()}}
        # The gradient leaves before the update: the neighbour need not wait for it.
        self._up.put(Outgoing("backward", packet.job, meta, gradients))
        self._step(meta.get("update") or (), meta["batch"], keep_gradients=False)

    # ----- helpers

    def _clip(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Clip the gradients where an update asks for it; ``meta`` with what the stages before this one must know."""
        if "norms" in meta:
            own = {str(self._deployment.stage): stage_squares(self._executor)}
            meta = {**meta, "norms": {**meta["norms"], **own}}
        clip_stage(self._executor, meta.get("clip", []), squares_in(meta), self._deployment.stages)
        return meta

    def _step(self, update: Sequence[Any], batch: int, keep_gradients: bool) -> None:
        if not update:
            return
        started = self._now()
        for index, groups in update:
            self._executor.step(index, groups, keep_gradients=keep_gradients)
        self._recorder.stepped(batch, started, self._now())

    def _now(self) -> float:
        """The time once the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _zero_gradients(self, packet: Packet) -> None:
        for index in packet.meta.get("zero", ()):
            self._executor.zero_gradients(index)
        clip_stage(self._executor, packet.meta.get("clipped", []), {}, self._deployment.stages)

    def _decode(self, packet: Packet) -> list[Tensor | None]:
        try:
            return [None if p is None else decode(p).to(self._device) for p in packet.payloads]
        except CodecError as error:
            neighbour = "previous" if packet.direction == "down" else "next"
            raise ValueError(
                f"stage {self._deployment.stage}: {describe(packet.kind, packet.meta)} from the {neighbour} stage"
                f" cannot be decoded: {error}"
            ) from error

    def _is_full(self) -> bool:
        return self._waiting_jobs() >= self._queue_limit

    def _is_next(self, key: tuple[str, int]) -> bool:
        return self._order is not None and self._order.next() == key

    def _waiting_jobs(self) -> int:
        return len(self._free) + sum(kind == "forward" for kind, _ in self._arrived)

    def _check(self) -> None:
        if self._fault is not None:
            raise StageFault(self._fault)
        if self._closed:
            raise WrongTerm(f"stage {self._deployment.stage} on {self._where} is closed")

    def _command(self, function: Callable[[], T], timeout: float, what: str) -> T:
        future: Future[T] = Future()
        with self._lock:
            self._check()
            self._commands.append((function, future))
            self._lock.notify_all()
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise TimeoutError(
                f"stage {self._deployment.stage} on {self._where} did not {what} within {timeout:g} s"
            ) from None

    def _fail(self, doing: str, error: BaseException) -> None:
        if isinstance(error, StageFault):
            fault = error.fault
        else:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            line = f"{type(error).__name__}: {error}"
            fault = Fault(self._deployment.stage, self._layers, self._where, doing, line, trace)
        with self._lock:
            if self._fault is not None or self._closed:
                return
            self._fault = fault
            commands, self._commands = list(self._commands), deque()
            self._lock.notify_all()
        log.error("stage %d failed in the %s: %s", fault.stage, fault.doing, fault.error)
        for _, future in commands:
            future.set_exception(StageFault(fault))

    def _make_sender(self, neighbour: int, channel: Channel, codec: Codec, eval_codec: Codec) -> Sender:
        deployment = self._deployment
        return Sender(
            f"link from stage {deployment.stage} to stage {neighbour}",
            channel,
            codec,
            eval_codec,
            run=deployment.run,
            term=deployment.term,
            recorder=self._recorder,
            peer=neighbour,
            # Where the schedule fixes the order of work, the order of arrival does not matter.
            overlap=self._order is not None,
            on_error=self._fail,
        )


def build_stage(
    deployment: Deployment,
    *,
    device: torch.device,
    upstream: Channel,
    downstream: Channel,
    where: str,
    allowed_optimizers: Mapping[str, type[Optimizer]] | None = None,
) -> StageRunner:
    """What a worker daemon makes of a deployment.

    Raises:
        ValueError: If the program is not one that this version can run, or an optimizer is not allowed here.
    """
    return StageRunner(
        deployment,
        device=device,
        upstream=upstream,
        downstream=downstream,
        where=where,
        allowed_optimizers=allowed_optimizers,
    )


def _section(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    start = prefix + "/"
    return {name[len(start) :]: tensor.to(device) for name, tensor in tensors.items() if name.startswith(start)}


def _job(packet: Packet) -> Job:
    meta = packet.meta
    return Job(packet.job, meta["batch"], meta["micro"], meta["updates"])


def _present(tensors: list[Tensor | None]) -> list[Tensor]:
    if any(tensor is None for tensor in tensors):
        raise ValueError("an activation is missing in the packet")
    return [tensor for tensor in tensors if tensor is not None]


def _run_command(function: Callable[[], T], future: Future[T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
