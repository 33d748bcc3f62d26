"""CentralPipeline: what runs beside the Trainer. Jobs in flight, stage 0, drain, deploy and gather."""

from __future__ import annotations

import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accept.garbage import Freeze
from lightning_accept.graph import Chain, Trace
from lightning_accept.latency.memory import process_bytes
from lightning_accept.partition.link import Speed
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.central_link import sender_to
from lightning_accept.pipeline.clipping import (
    CentralClipping,
    Squares,
    clip_stage,
    squares_in,
    stage_squares,
    wants_norms,
)
from lightning_accept.pipeline.deploy import Settings, choose_workers, make_deployments, put_in_place
from lightning_accept.pipeline.events import EventLog
from lightning_accept.pipeline.gather import gradients_in, restore_state
from lightning_accept.pipeline.handover import nbytes
from lightning_accept.pipeline.mailbox import Mailbox
from lightning_accept.pipeline.messages import (
    Deployment,
    Direction,
    Fault,
    Packet,
    PipelineError,
    Sources,
    StageFault,
    StageReport,
    StageState,
    reports_in,
)
from lightning_accept.pipeline.micro_batch import join, join_gradients, split, split_like
from lightning_accept.pipeline.moves import Calls, MoveReport, broken_off, fetch, forget, put
from lightning_accept.pipeline.placement import Holding, Target, passage, place
from lightning_accept.pipeline.recorder import StageRecorder
from lightning_accept.pipeline.sender import Outgoing, Sender
from lightning_accept.pipeline.stage import Job, StageExecutor
from lightning_accept.pipeline.stage_zero import UserGradients, build_stage0
from lightning_accept.pipeline.ticket import Ticket, Update
from lightning_accept.pipeline.transport import WorkerHandle
from lightning_accept.progress import SILENT, ProgressLine


class CentralPipeline:
    """The central node's end of the pipeline: holds stage 0 and keeps jobs in flight.

    All methods are called from one thread at a time.

    Args:
        workers: The workers in the order of their stages. All are claimed; which of them hold stages is up to
            :meth:`deploy` and :meth:`move`.
        settings: What holds for all stages.
        device: The central node's device.
        timeout: Seconds within which a worker must answer.
        batch_timeout: Seconds within which a batch must come back.
        progress: Shows deploying, moving and gathering.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        settings: Settings,
        *,
        device: torch.device,
        timeout: float,
        batch_timeout: float,
        progress: ProgressLine = SILENT,
    ) -> None:
        if not workers:
            raise ValueError("a pipeline needs at least one worker")
        self.claimed = list(workers)
        """All workers of the run; those without a stage at present are idle."""
        self.workers = list(workers)
        """The workers that hold stages, in their order."""
        self.settings = settings
        self.run = secrets.token_hex(8)
        self.term = 0
        self.schedule: Schedule | None = None
        self.bits: dict[str, int] = {}
        """Bit widths in force for new batches: ``forward`` and ``backward``."""
        self.epoch = 0
        """The training epoch that new batches belong to."""
        self.reports: dict[int, StageReport] = {}
        """What each stage last reported, by its number; seconds are those of one job. Emptied by a deployment."""
        self.clipping = CentralClipping()
        """What is to be clipped before the next optimizer step."""
        self.waited = 0.0
        """Seconds for which this process has waited for packets so far."""
        self.device = device
        self._progress = progress
        self._timeout = timeout
        self.batch_timeout = batch_timeout
        """Seconds within which a batch must come back, or a state be gathered."""
        self._link_token = secrets.token_hex(16)
        self.events = EventLog()
        """What stage 0 and its links did."""
        self.before_term: list[Callable[[], None]] = []
        """Called before stages are replaced, with nothing in flight."""
        self._recorder = StageRecorder(self.events, 0, 0)
        self._mailbox = Mailbox(self.claimed, device, self._note_packet)
        self._senders: list[Sender] = []
        self._stage0: StageExecutor | None = None
        self._outstanding: deque[Ticket] = deque()
        self._next_job = 0
        self._next_batch = 0
        self._next_evaluation = 0
        self._next_step = 0
        self._flushed = 0
        self._random = False
        self._zeroed: list[int] = []
        self._unstepped: dict[str, Tensor] = {}
        self._user_gradients = UserGradients()
        self._target: Target | None = None
        self._placement: list[Holding] = []
        self._closed = False
        self._freeze = Freeze()

    # ----- life

    def connect(self, holder: str) -> list[dict[str, Any]]:
        """Claim all workers for this run.

        Args:
            holder: Who holds them, told to others that ask.

        Returns:
            Each worker's facts.

        Raises:
            PipelineError: If one is busy, refuses the token or is not there. None is held then.
        """
        facts = []
        try:
            for worker in self.claimed:
                facts.append(worker.claim(self.run, holder, self._link_token))
        except BaseException:
            self.close()
            raise
        self._mailbox.start()
        return facts

    def deploy(
        self,
        trace: Trace,
        chain: Chain,
        starts: Sequence[int],
        schedule: Schedule,
        optimizers: Sequence[Optimizer],
        workers: Sequence[WorkerHandle] | None = None,
    ) -> None:
        """Put every stage where it belongs, with the weights and optimizer state that the central node has now.

        Nothing may be in flight. Raises the term.

        Args:
            trace: The traced module.
            chain: Its layers.
            starts: Index of the first layer of every worker's stage.
            schedule: Windows and depth.
            optimizers: The LightningModule's optimizers; none outside fit.
            workers: The workers that hold the stages, some of the claimed ones in their order; the others are idle
                then. By default all.

        Raises:
            PipelineError: If something is in flight, the workers do not fit, or one refuses its stage.
        """
        self._refuse_in_flight("a deployment")
        self._end_term()
        chosen = choose_workers(self.claimed, workers, starts, schedule)
        target = Target(trace, chain, list(starts), schedule, optimizers, chosen)
        gradients = {**self._unstepped, **self._own_gradients()}
        self._close_senders()
        self.term += 1
        deployments = self._deployments(target, gradients, None)
        for codec in (self.settings.forward_codec, self.settings.backward_codec, self.settings.eval_codec):
            codec.prepare()
        put_in_place(deployments, self._progress)
        before, self._placement = self._placement, place(chain, starts, chosen)
        self._go_on_with(target, gradients)
        for holding in before:
            if holding.worker is not None and holding.worker not in chosen:
                holding.worker.forget(self.term)

    def move(
        self,
        trace: Trace,
        chain: Chain,
        starts: Sequence[int],
        schedule: Schedule,
        optimizers: Sequence[Optimizer],
        workers: Sequence[WorkerHandle] | None = None,
    ) -> MoveReport:
        """As :meth:`deploy`, but with the state that the stages have, of which only what changes hands travels.

        Weights, buffers, optimizer state and gradients that wait for their optimizer step end up where they are wanted,
        bit for bit: from worker to worker directly, or by way of the central node where these cannot reach each other.

        Args:
            trace: The trace that is deployed.
            chain: The layers that are deployed.
            starts: As for :meth:`deploy`.
            schedule: As for :meth:`deploy`.
            optimizers: As for :meth:`deploy`.
            workers: As for :meth:`deploy`.

        Raises:
            PipelineError: If something is in flight, the workers do not fit, or something goes wrong on the way; in the
                last case the pipeline has failed.
        """
        self._ready()
        self._refuse_in_flight("a move")
        self._end_term()
        started = time.perf_counter()
        chosen = choose_workers(self.claimed, workers, starts, schedule)
        target = Target(trace, chain, list(starts), schedule, optimizers, chosen)
        if self._target is None or self._target.trace is not trace or self._target.chain is not chain:
            raise PipelineError("layers of another trace cannot be moved; gather them and deploy the new ones")
        before, after = self._placement, place(chain, starts, chosen)
        travels, gradients = passage(before, after), self._own_gradients()
        self._close_senders()
        with self._progress.show(f"moving {travels.layers} layers", len(travels.fetched) + len(chosen)) as shown:
            calls = Calls(self.claimed, self._mailbox.check, shown.advance)
            try:
                fetched = fetch(calls, travels.fetched, self.term, self.batch_timeout)
                sources = [Sources(self.term, names) for names in travels.sources]
                self.term += 1
                carried = put(calls, self._deployments(target, gradients, sources), before, self.batch_timeout)
                if travels.fetched:
                    restore_state(fetched, trace.parameters, trace.buffers, optimizers)
                self._placement = after
                self._go_on_with(target, {**gradients, **gradients_in(fetched)})
                forget(calls, [*before, *after], self.term)
            except BaseException as error:
                self._mailbox.fail(broken_off(error))
                raise
        return MoveReport(carried + nbytes(fetched), travels.layers, time.perf_counter() - started)

    def _deployments(
        self, target: Target, gradients: Mapping[str, Tensor], sources: Sequence[Sources] | None
    ) -> list[tuple[WorkerHandle, Deployment]]:
        deployments = make_deployments(
            target,
            self.settings,
            gradients=gradients,
            run=self.run,
            term=self.term,
            link_token=self._link_token,
            sources=sources,
        )
        return list(zip(target.workers, deployments, strict=True))

    def _go_on_with(self, target: Target, gradients: Mapping[str, Tensor]) -> None:
        """Take up the central node's part once all workers' stages stand."""
        schedule, codecs = target.schedule, self.settings
        self._target, self.schedule, self.workers = target, schedule, target.workers
        stage0 = self._stage0 = build_stage0(
            target.trace, target.chain, target.starts[0], schedule, target.optimizers, codecs, self.device
        )
        if not schedule.synchronous:
            stage0.restore_gradients(gradients)
        own = stage0.module.parameters if schedule.synchronous else {}
        self._user_gradients.settle_in(own, target.optimizers, gradients, self._zeroed)
        self._unstepped = {}
        self.clipping.deployed(len(target.workers) + 1, schedule.synchronous)
        # Dropout beyond stage 0 then draws from the central node's random state, as plain training does.
        later = target.chain.program(target.starts[0], len(target.chain.layers))
        self._random = schedule.synchronous and schedule.micro_batches == 1 and later.random(training=True)
        self._next_job = self._flushed = self._next_evaluation = self._next_step = 0
        self.reports = {}
        self._recorder = StageRecorder(self.events, 0, self.term)
        first, last = self.workers[0], self.workers[-1]
        self._mailbox.new_term(self.term)
        self._mailbox.follow(first, last)
        _, of_output = codecs.output_codecs(target.chain)
        ends = [(first, 1, codecs.forward_codec), (last, len(self.workers), of_output)]
        self._senders = [
            sender_to(
                *end,
                codecs.eval_codec,
                run=self.run,
                term=self.term,
                recorder=self._recorder,
                overlap=not schedule.synchronous,
                fail=self._mailbox.fail,
            )
            for end in ends
        ]
        for sender in self._senders:
            sender.start()
        self._freeze.begin()

    def _end_term(self) -> None:
        if self.deployed:
            for action in self.before_term:
                action()

    def _close_senders(self) -> None:
        for sender in self._senders:
            sender.close()

    def _own_gradients(self) -> dict[str, Tensor]:
        """Stage 0's gradients that wait for their optimizer step."""
        if self._stage0 is None:
            return {}
        return self._user_gradients.waiting() if self._synchronous else self._stage0.unstepped_gradients()

    def _refuse_in_flight(self, what: str) -> None:
        if self._outstanding:
            raise PipelineError(f"drain the pipeline before {what}")

    @property
    def deployed(self) -> bool:
        """Whether stages are in place."""
        return self._stage0 is not None

    @property
    def failed(self) -> bool:
        """Whether the pipeline has stopped for good."""
        return self._mailbox.failed

    @property
    def in_flight(self) -> int:
        """Batches begun and not fully backwarded."""
        return len(self._outstanding)

    @property
    def completed(self) -> int:
        """Training batches that are not in flight any more."""
        return self._next_batch - len(self._outstanding)

    def close(self) -> None:
        """Give all workers back and end all threads. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        self._mailbox.fail(PipelineError("the pipeline is closed"))
        self._mailbox.close()
        self._close_senders()
        self._freeze.end()
        with ThreadPoolExecutor(len(self.claimed)) as pool:
            list(pool.map(lambda worker: worker.release(), self.claimed))

    # ----- training

    def begin(
        self,
        inputs: Sequence[Tensor],
        *,
        updates: bool = True,
        autocast: str | None = None,
        input_gradients: bool = False,
    ) -> Ticket:
        """Forward stage 0 for one batch and send its activations on their way.

        Args:
            inputs: The module's tensor inputs in the trace's order.
            updates: Whether the batch is expected to end with an optimizer step.
            autocast: Name of the autocast dtype, or None.
            input_gradients: Whether gradients of the inputs are wanted (synchronous mode only).
        """
        stage0, schedule = self._ready()
        pieces = split(inputs, schedule.micro_batches)
        ticket = Ticket(self._next_batch, [], pieces, self.epoch)
        self._next_batch += 1
        for micro, piece in enumerate(pieces.parts):
            job = Job(self._next_job, ticket.batch, micro, updates)
            self._next_job += 1
            ticket.jobs.append(job.number)
            meta: dict[str, Any] = {
                "batch": ticket.batch,
                "micro": micro,
                "micros": schedule.micro_batches,
                "updates": updates,
                "epoch": self.epoch,
            }
            if autocast is not None:
                meta["autocast"] = autocast
            if "forward" in self.bits:
                meta["bits"] = self.bits["forward"]
            outputs: list[Tensor] = []
            if piece is None:
                meta["empty"] = True
            else:
                wanted = [input_gradients and tensor.requires_grad for tensor in piece]
                started = self._now()
                with self._naming_stage0(f"forward of batch {ticket.batch}"):
                    outputs, meta["needs_grad"] = stage0.forward(job, piece, wanted, autocast)
                self._recorder.forwarded(job.number, ticket.batch, micro, started, self._now(), stage0.updates_done)
                if self._random:
                    meta["random_state"] = True
                    outputs = [*outputs, torch.get_rng_state()]
            self._senders[0].put(Outgoing("forward", job.number, meta, outputs))
        self._outstanding.append(ticket)
        return ticket

    def output(self, ticket: Ticket) -> list[Tensor]:
        """Wait for the output of a batch begun before; tensors without gradient history, on the central device."""
        parts = []
        for job in ticket.jobs:
            meta, tensors = self._wait("forward", job, f"the output of batch {ticket.batch}")
            if meta.get("empty"):
                continue
            if meta.get("random_state"):
                state = tensors.pop()
                assert state is not None
                torch.set_rng_state(state.cpu())
            ticket.needs_grad = meta["needs_grad"]
            parts.append([tensor for tensor in tensors if tensor is not None])
        ticket.returned = self._now()
        return join(parts, ticket.pieces)

    def backward(self, ticket: Ticket, gradients: Sequence[Tensor | None], update: Update | None) -> None:
        """Send the gradients of a batch's outputs on their way.

        Args:
            ticket: The batch.
            gradients: For each output its gradient, None where there is none.
            update: The optimizer steps that every stage takes after this batch; None where there is none.
        """
        self._mailbox.check()
        if ticket.backwarded:
            raise PipelineError(
                f"backward was called twice through the pipelined call of batch {ticket.batch}; add the losses up and"
                " call it once"
            )
        ticket.backwarded = True
        ticket.update = update
        if ticket.returned is not None:
            self._recorder.computed("loss", ticket.batch, ticket.returned, self._now())
        for job, meta, tensors in self._backward_packets(ticket, gradients):
            self._senders[1].put(Outgoing("backward", job, meta, tensors))

    def skip(self, ticket: Ticket, update: Update | None = None, undo: bool = False) -> None:
        """Tell all stages that a batch will not be backwarded; ``update`` as in :meth:`backward`.

        With ``undo`` it and all after it, which must be skipped likewise, are not to have been forwarded either.
        """
        ticket.backwarded = True
        ticket.update = update
        skip = {"skip": True, "undo": True} if undo else {"skip": True}
        for index, job in enumerate(ticket.jobs):
            meta = self._backward_meta(ticket, index)
            self._senders[1].put(Outgoing("backward", job, {**meta, **skip}))

    def complete(self, ticket: Ticket) -> None:
        """Wait for the gradient of stage 0's output, do stage 0's backward, and update stage 0 where that is due.

        Batches are completed in the order in which their gradients were sent.
        """
        stage0, schedule = self._ready()
        parts: list[list[Tensor | None]] = []
        for micro, (job, piece) in enumerate(zip(ticket.jobs, ticket.pieces.parts, strict=True)):
            meta, tensors = self._wait("backward", job, f"the gradient of batch {ticket.batch} at stage 0")
            self.reports.update(reports_in(meta))
            if piece is None:
                continue
            if meta.get("skip"):
                stage0.skip(job, undo="undo" in meta)
                self._recorder.skipped(job)
            else:
                started = self._now()
                with self._naming_stage0(f"backward of batch {ticket.batch}"):
                    parts.append(stage0.backward(job, tensors))
                ended = self._now()
                forward_seconds = self._recorder.backwarded(
                    job, ticket.batch, micro, started, ended, stage0.updates_done
                )
                assert forward_seconds is not None
                self._report_stage0(forward_seconds, ended - started)
        self._clip(stage0, ticket, squares_in(meta))
        ticket.input_gradients = join_gradients(parts)
        ticket.completed = True
        self._outstanding.remove(ticket)
        if not schedule.synchronous and ticket.update:
            started = self._now()
            for index, groups in ticket.update:
                stage0.step(index, groups)
            self._recorder.stepped(ticket.batch, started, self._now())

    def complete_lagging(self, lag: int) -> None:
        """Complete batches until at most ``lag`` are left whose gradient was sent."""
        backwarded = [ticket for ticket in self._outstanding if ticket.backwarded]
        for ticket in backwarded[: max(0, len(backwarded) - lag)]:
            self.complete(ticket)

    def flush(self) -> None:
        """Tell all stages that no further batch begins before those in flight have been backwarded.

        Without it a stage whose window is not full would wait for a forward that does not come.
        """
        if not self._synchronous and self._flushed < self._next_job:
            self._flushed = self._next_job
            self._senders[0].put(Outgoing("flush", self._next_job, {}))

    def settle(self) -> None:
        """Finish the backward of every batch whose gradient was sent, on every stage."""
        if self._stage0 is None:
            return
        pending = [ticket for ticket in self._outstanding if ticket.backwarded]
        if pending:
            self.flush()
        for ticket in pending:
            self.complete(ticket)

    def abandon(self) -> None:
        """Finish what was backwarded and drop every other batch in flight.

        These were begun ahead of their turn, and leave no trace. In synchronous mode they were not, and plain training
        has forwarded them too.
        """
        for ticket in list(self._outstanding):
            if not ticket.backwarded:
                self.skip(ticket, undo=not self._synchronous)
        self.settle()

    def zero_gradients(self, index: int) -> None:
        """In synchronous mode: drop what all stages have added up for the parameters of optimizer ``index``.

        It takes effect before the next backward, as ``optimizer.zero_grad()`` does.
        """
        self._zeroed.append(index)
        self.clipping.zeroed(index)
        self._user_gradients.done([index])

    def take_gradients(self) -> dict[str, Tensor]:
        """In synchronous mode: stage 0's gradients since the last call, by parameter name."""
        gradients = self._ready()[0].take_gradients()
        self._user_gradients.added(gradients)
        return gradients

    def step(self, update: Update) -> None:
        """In synchronous mode: make every worker take these optimizer steps now."""
        stage0, _ = self._ready()
        packet = Packet("step", self.run, self.term, self._next_step, {"update": update, **self._done_to_gradients()})
        self._next_step += 1
        for worker in self.workers:
            worker.send(packet)
        stage0.weights_changed()
        self._user_gradients.done([index for index, _ in update])

    # ----- evaluation

    def evaluate(self, inputs: Sequence[Tensor], *, training: bool, autocast: str | None = None) -> int:
        """Forward a batch without gradients; returns the number under which :meth:`evaluated` hands out its output.

        Args:
            inputs: The module's tensor inputs in the trace's order.
            training: Train mode or eval mode of the module.
            autocast: Name of the autocast dtype, or None.
        """
        stage0, _ = self._ready()
        number = self._next_evaluation
        self._next_evaluation += 1
        meta: dict[str, Any] = {"batch": number, "training": training}
        if autocast is not None:
            meta["autocast"] = autocast
        started = self._now()
        with self._naming_stage0(f"forward of evaluation batch {number}"):
            outputs = stage0.run(inputs, training, autocast)
        self._recorder.computed("evaluate", number, started, self._now())
        self._senders[0].put(Outgoing("evaluate", number, meta, outputs))
        return number

    def evaluated(self, number: int) -> list[Tensor]:
        """Wait for the output of a batch given to :meth:`evaluate`."""
        _, tensors = self._wait("evaluate", number, f"the output of evaluation batch {number}")
        return [tensor for tensor in tensors if tensor is not None]

    # ----- state

    def gather(self, report: Callable[[int, StageState], None]) -> None:
        """Fetch every worker's state, one after the other, and hand it to ``report`` with the stage's number.

        Every backward whose gradient was sent is finished first. Gradients added up for an update that is yet to come
        (within gradient accumulation) are kept for the next deployment.
        """
        self.settle()
        self._unstepped = {} if self._stage0 is None or self._synchronous else self._stage0.unstepped_gradients()
        count = len(self.workers)
        with self._progress.show("gathering", count) as shown:
            for stage, worker in enumerate(self.workers, 1):
                shown.begin(f"gathering stage {stage} of {count} from {worker.name}")
                self._mailbox.check()
                state = worker.state(self.batch_timeout)
                self._unstepped.update(gradients_in(state))
                report(stage, state)
                del state  # or the next one would be fetched while this one is still held
                shown.update(1.0)

    def stats(self) -> list[dict[str, Any]]:
        """Figures of every stage, the central node's first."""
        stage0, _ = self._ready()
        names: tuple[Direction, Direction] = ("down", "up")
        self._recorder.figures.waiting_seconds = self.waited
        own: dict[str, Any] = {
            "stage": 0,
            "layers": list(stage0.module.program.layers),
            "term": self.term,
            "updates": stage0.updates_done,
            "in_flight": self.in_flight,
            "memory": process_bytes(self.device),
            **self._recorder.stats(),
            "links": {name: sender.stats() for name, sender in zip(names, self._senders, strict=True)},
            "received": {name: self._mailbox.stats(name) for name in names},
        }
        return [own, *(worker.stats() for worker in self.workers)]

    @property
    def received(self) -> dict[str, Speed | None]:
        """How fast packets come in: ``up`` from the first worker, ``down`` from the last; None while not known."""
        return {"up": self._mailbox.speed("up"), "down": self._mailbox.speed("down")}

    # ----- helpers

    def _report_stage0(self, forward: float, backward: float) -> None:
        down, up = (sender.meter.bandwidth for sender in self._senders)
        self.reports[0] = StageReport(forward, backward, self._recorder.last_step, down, up)

    def _note_packet(self, packet: Packet) -> None:
        """A packet has come in, from the last worker or the first one; called in the thread that received it."""
        if packet.term != self.term:
            return
        now, peer = time.perf_counter(), 1 if packet.direction == "up" else len(self.workers)
        seconds = 0.0 if packet.transfer is None else packet.transfer.seconds
        self._recorder.crossed("receive", packet, peer, now - seconds, now)

    def _now(self) -> float:
        """The time once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def _synchronous(self) -> bool:
        return self.schedule is not None and self.schedule.synchronous

    def _ready(self) -> tuple[StageExecutor, Schedule]:
        self._mailbox.check()
        if self._stage0 is None or self.schedule is None:
            raise PipelineError("no stages are deployed")
        return self._stage0, self.schedule

    @contextmanager
    def _naming_stage0(self, doing: str) -> Iterator[None]:
        """Report what fails in stage 0 as workers report it for theirs."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            assert self._stage0 is not None
            layers = tuple(self._stage0.module.program.layers)
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            line = f"{type(error).__name__}: {error}"
            raise StageFault(Fault(0, layers, "central node", doing, line, trace)) from error

    def _wait(self, kind: str, job: int, what: str) -> tuple[dict[str, Any], list[Tensor | None]]:
        started = time.perf_counter()
        try:
            return self._mailbox.wait(kind, job, what, self.batch_timeout)
        finally:
            self.waited += time.perf_counter() - started

    def _backward_meta(self, ticket: Ticket, index: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "batch": ticket.batch,
            "micro": index,
            "micros": len(ticket.jobs),
            "epoch": ticket.epoch,
        }
        last = index == len(ticket.jobs) - 1
        if ticket.update and last:
            meta["update"] = ticket.update
            ticket.clips = self.clipping.take()
            if ticket.clips:
                meta["clip"] = ticket.clips
        if last and (self._synchronous or wants_norms(ticket.clips)):
            meta["norms"] = {}
        if "backward" in self.bits:
            meta["bits"] = self.bits["backward"]
        if ticket.pieces.parts[index] is None:
            meta["empty"] = True
        if self._synchronous:
            meta.update(self._done_to_gradients())
        return meta

    def _done_to_gradients(self) -> dict[str, Any]:
        """What the user has done to the gradients since workers were last told of it (synchronous mode)."""
        done = {"zero": self._zeroed, "clipped": self.clipping.take()}
        self._zeroed = []
        return {name: value for name, value in done.items() if value}

    def _clip(self, stage0: StageExecutor, ticket: Ticket, squares: dict[int, Squares]) -> None:
        """Clip stage 0's gradients where an update asks for it, and note all stages' norms."""
        if squares and not self._synchronous:
            squares[0] = stage_squares(stage0)
        clip_stage(stage0, ticket.clips, squares, len(self.workers) + 1)
        self.clipping.learn(squares)

    def _backward_packets(
        self, ticket: Ticket, gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, dict[str, Any], list[Tensor | None]]]:
        parts = split_like(gradients, ticket.pieces)
        for index, (job, part) in enumerate(zip(ticket.jobs, parts, strict=True)):
            yield job, self._backward_meta(ticket, index), part
