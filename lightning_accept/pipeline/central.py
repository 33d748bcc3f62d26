"""CentralPipeline: what runs beside the Trainer. Jobs in flight, stage 0, drain, deploy and gather."""

from __future__ import annotations

import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accept.graph import Chain, StageModule, Trace
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.deploy import Settings, make_deployments
from lightning_accept.pipeline.mailbox import Mailbox
from lightning_accept.pipeline.messages import Fault, Packet, PipelineError, StageFault, StageState, TransportError
from lightning_accept.pipeline.micro_batch import Pieces, join, split, split_like
from lightning_accept.pipeline.sender import Outgoing, Sender
from lightning_accept.pipeline.stage import Job, StageExecutor
from lightning_accept.pipeline.transport import WorkerHandle

Update = list[list[Any]]
"""Optimizer steps to take: pairs of optimizer index and hyper-parameters of its param groups."""


@dataclass
class Ticket:
    """One pipelined call in train mode, from its forward to its backward.

    Attributes:
        batch: Number of the batch.
        jobs: Numbers of its jobs, one per micro-batch.
        pieces: How the batch was split.
        epoch: The training epoch that it belongs to.
        update: The optimizer steps that end it.
        backwarded: The output's gradient is on its way.
        completed: The backward of stage 0 is done.
        needs_grad: For every output whether it takes a gradient; known once the output has returned.
        input_gradients: For every input its gradient, where one was asked for; known once completed.
    """

    batch: int
    jobs: list[int]
    pieces: Pieces
    epoch: int = 0
    update: Update | None = None
    backwarded: bool = False
    completed: bool = False
    needs_grad: list[bool] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)


class CentralPipeline:
    """The central node's end of the pipeline: holds stage 0 and keeps jobs in flight.

    All methods are called from one thread at a time.

    Args:
        workers: The workers in the order of their stages.
        settings: What holds for all stages.
        device: The central node's device.
        timeout: Seconds within which a worker must answer.
        batch_timeout: Seconds within which a batch must come back.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        settings: Settings,
        *,
        device: torch.device,
        timeout: float,
        batch_timeout: float,
    ) -> None:
        if not workers:
            raise ValueError("a pipeline needs at least one worker")
        self.workers = list(workers)
        self.settings = settings
        self.run = secrets.token_hex(8)
        self.term = 0
        self.schedule: Schedule | None = None
        self.bits: dict[str, int] = {}
        """Bit widths in force for new batches: ``forward`` and ``backward``."""
        self.epoch = 0
        """The training epoch that new batches belong to."""
        self.stage_times: dict[int, tuple[float, float]] = {}
        """Seconds of forward and backward that each stage last reported for one job."""
        self._device = device
        self._timeout = timeout
        self.batch_timeout = batch_timeout
        """Seconds within which a batch must come back, or a state be gathered."""
        self._link_token = secrets.token_hex(16)
        self._mailbox = Mailbox(self.workers, device)
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
        self._closed = False

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
            for worker in self.workers:
                facts.append(worker.claim(self.run, holder))
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
    ) -> None:
        """Put every stage where it belongs, with the weights and optimizer state that the central node has now.

        Nothing may be in flight. Raises the term.

        Args:
            trace: The traced module.
            chain: Its layers.
            starts: Index of the first layer of every worker's stage.
            schedule: Windows and depth.
            optimizers: The LightningModule's optimizers; none outside fit.
        """
        if self._outstanding:
            raise PipelineError("drain the pipeline before a deployment")
        for sender in self._senders:
            sender.close()
        self.term += 1
        deployments = make_deployments(
            trace,
            chain,
            starts,
            schedule,
            optimizers,
            self.settings,
            self.workers,
            gradients=self._unstepped,
            run=self.run,
            term=self.term,
            link_token=self._link_token,
        )
        for codec in (self.settings.forward_codec, self.settings.backward_codec, self.settings.eval_codec):
            codec.prepare()
        # From the last to the first: a stage may send as soon as it stands, and must find its neighbour there.
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(
                pool.map(lambda pair: pair[0].deploy(pair[1]), list(zip(self.workers, deployments, strict=True))[::-1])
            )
        self.schedule = schedule
        program = chain.program(0, starts[0])
        module = StageModule(
            program,
            {name: trace.parameters[name] for name in program.parameters},
            {name: trace.buffers[name] for name in program.buffers},
            program.constants,
            self._device,
        )
        self._stage0 = StageExecutor(
            module,
            # In synchronous mode the Trainer's own optimizer step updates stage 0, so that every hook of Lightning sees
            # its gradients where plain training has them.
            [] if schedule.synchronous else optimizers,
            weight_prediction=self.settings.weight_prediction and not schedule.synchronous,
            seed=None if schedule.synchronous else self.settings.seed,
            stage=0,
            shared_optimizers=True,
        )
        if not schedule.synchronous:
            self._stage0.restore_gradients(self._unstepped)
        self._unstepped = {}
        # Dropout beyond stage 0 then draws from the central node's random state, as plain training does.
        later = chain.program(starts[0], len(chain.layers))
        self._random = schedule.synchronous and schedule.micro_batches == 1 and later.random(training=True)
        self._next_job = self._flushed = self._next_evaluation = self._next_step = 0
        self._mailbox.new_term(self.term)
        codecs = self.settings
        self._senders = [
            self._make_sender("link from stage 0 to stage 1", self.workers[0], codecs.forward_codec),
            self._make_sender(
                f"link from stage 0 to stage {len(self.workers)}", self.workers[-1], codecs.backward_codec
            ),
        ]
        for sender in self._senders:
            sender.start()

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

    def close(self) -> None:
        """Give all workers back and end all threads. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        self._mailbox.fail(PipelineError("the pipeline is closed"))
        self._mailbox.close()
        for sender in self._senders:
            sender.close()
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(lambda worker: worker.release(), self.workers))

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
                with self._naming_stage0(f"forward of batch {ticket.batch}"):
                    outputs, meta["needs_grad"] = stage0.forward(job, piece, wanted, autocast)
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
        for job, meta, tensors in self._backward_packets(ticket, gradients):
            self._senders[1].put(Outgoing("backward", job, meta, tensors))

    def skip(self, ticket: Ticket, update: Update | None = None) -> None:
        """Tell all stages that a batch will not be backwarded; ``update`` as in :meth:`backward`."""
        ticket.backwarded = True
        ticket.update = update
        for index, job in enumerate(ticket.jobs):
            meta = self._backward_meta(ticket, index)
            self._senders[1].put(Outgoing("backward", job, {**meta, "skip": True}))

    def complete(self, ticket: Ticket) -> None:
        """Wait for the gradient of stage 0's output, do stage 0's backward, and update stage 0 where that is due.

        Batches are completed in the order in which their gradients were sent.
        """
        stage0, schedule = self._ready()
        parts: list[list[Tensor | None]] = []
        for job, piece in zip(ticket.jobs, ticket.pieces.parts, strict=True):
            meta, tensors = self._wait("backward", job, f"the gradient of batch {ticket.batch} at stage 0")
            for stage, (forward, backward) in meta.get("times", {}).items():
                self.stage_times[int(stage)] = (forward, backward)
            if piece is None:
                continue
            if meta.get("skip"):
                stage0.skip(job)
            else:
                started = time.perf_counter()
                with self._naming_stage0(f"backward of batch {ticket.batch}"):
                    parts.append(stage0.backward(job, tensors))
                self.stage_times[0] = (0.0, time.perf_counter() - started)
        ticket.input_gradients = _join_gradients(parts)
        ticket.completed = True
        self._outstanding.remove(ticket)
        if not schedule.synchronous:
            for index, groups in ticket.update or ():
                stage0.step(index, groups)

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
        """Finish what was backwarded and drop every other batch in flight."""
        for ticket in list(self._outstanding):
            if not ticket.backwarded:
                self.skip(ticket)
        self.settle()

    def zero_gradients(self, index: int) -> None:
        """In synchronous mode: drop what all stages have added up for the parameters of optimizer ``index``.

        It takes effect before the next backward, as ``optimizer.zero_grad()`` does.
        """
        self._zeroed.append(index)

    def take_gradients(self) -> dict[str, Tensor]:
        """In synchronous mode: stage 0's gradients since the last call, by parameter name."""
        return self._ready()[0].take_gradients()

    def step(self, update: Update) -> None:
        """In synchronous mode: make every worker take these optimizer steps now."""
        stage0, _ = self._ready()
        packet = Packet("step", self.run, self.term, self._next_step, {"update": update, "zero": self._zeroed})
        self._zeroed = []
        self._next_step += 1
        for worker in self.workers:
            worker.send(packet)
        stage0.weights_changed()

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
        with self._naming_stage0(f"forward of evaluation batch {number}"):
            outputs = stage0.run(inputs, training, autocast)
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
        for stage, worker in enumerate(self.workers, 1):
            self._mailbox.check()
            state = worker.state(self.batch_timeout)
            for name, tensor in state.tensors.items():
                if name.startswith("grad/"):
                    self._unstepped[name.removeprefix("grad/")] = tensor
            report(stage, state)

    def stats(self) -> list[dict[str, Any]]:
        """Figures of every stage, the central node's first."""
        names = ("down", "up")
        own: dict[str, Any] = {
            "stage": 0,
            "in_flight": self.in_flight,
            "links": {name: vars(s.figures).copy() for name, s in zip(names, self._senders, strict=True)},
        }
        return [own, *(worker.stats() for worker in self.workers)]

    # ----- helpers

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
        return self._mailbox.wait(kind, job, what, self.batch_timeout)

    def _backward_meta(self, ticket: Ticket, index: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "batch": ticket.batch,
            "micro": index,
            "micros": len(ticket.jobs),
            "epoch": ticket.epoch,
        }
        if ticket.update and index == len(ticket.jobs) - 1:
            meta["update"] = ticket.update
        if "backward" in self.bits:
            meta["bits"] = self.bits["backward"]
        if ticket.pieces.parts[index] is None:
            meta["empty"] = True
        if self._zeroed:
            meta["zero"], self._zeroed = self._zeroed, []
        return meta

    def _backward_packets(
        self, ticket: Ticket, gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, dict[str, Any], list[Tensor | None]]]:
        parts = split_like(gradients, ticket.pieces)
        for index, (job, part) in enumerate(zip(ticket.jobs, parts, strict=True)):
            yield job, self._backward_meta(ticket, index), part

    def _make_sender(self, name: str, worker: WorkerHandle, codec: Any) -> Sender:
        return Sender(
            name,
            _WorkerChannel(worker),
            codec,
            self.settings.eval_codec,
            run=self.run,
            term=self.term,
            on_error=lambda doing, error: self._mailbox.fail(_explain(doing, error)),
        )


class _WorkerChannel:
    """A worker's handle as a channel that may be closed without closing the worker."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    def send(self, packet: Packet) -> None:
        self._worker.send(packet)

    def close(self) -> None:
        pass


def _explain(doing: str, error: BaseException) -> BaseException:
    if isinstance(error, PipelineError):
        return error
    wrapped = TransportError(f"{doing} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _join_gradients(parts: list[list[Tensor | None]]) -> list[Tensor | None]:
    joined: list[Tensor | None] = []
    for column in zip(*parts, strict=True):
        present = [gradient for gradient in column if gradient is not None]
        joined.append(present[0] if len(present) == 1 else torch.cat(present) if present else None)
    return joined
