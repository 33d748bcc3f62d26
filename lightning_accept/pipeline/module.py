"""PipelinedModule: stands in for one module's forward, and keeps the stages that serve it in place."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accept.graph import Chain, Trace, trace
from lightning_accept.partition.forecast import Forecast
from lightning_accept.partition.planner import balanced
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.deploy import resolve_partition
from lightning_accept.pipeline.foresight import Foresight
from lightning_accept.pipeline.gather import restore_state
from lightning_accept.pipeline.messages import PipelineError, StageState
from lightning_accept.pipeline.moves import MoveReport
from lightning_accept.pipeline.suspended import Call, SuspendedStep
from lightning_accept.pipeline.ticket import Ticket

log = logging.getLogger("lightning_accept")

_EVAL_MODE = (
    "{} is to be trained in eval mode, but the pipeline differentiates in train mode only; put the submodules that are"
    " to stay in eval mode (a frozen BatchNorm) in it one by one, and leave the module itself in train mode"
)


class PipelinedModule:
    """Replaces ``module.forward`` by a call through the pipeline.

    The stages are put in place at the first call, whose inputs the module is traced with, and again whenever a call
    comes whose inputs the trace does not accept.

    Args:
        module: The module.
        name: Its dotted path in the LightningModule, or its class's name, for messages.
        pipeline: The pipeline that serves it.
        schedule: Windows and depth, until foresight chooses others.
        partition: ``auto`` (stages of equal work, by FLOPs), or the first layer of every worker's stage.
        optimizers: Gives the optimizers in force.
        foresight: Measures the devices and chooses partition and schedule; None for neither.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        pipeline: CentralPipeline,
        schedule: Schedule,
        partition: str | Sequence[int | str],
        optimizers: Callable[[], Sequence[Optimizer]],
        foresight: Foresight | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.pipeline = pipeline
        self.chain: Chain | None = None
        self.starts: list[int] = []
        self.calls = 0
        """Pipelined calls so far."""
        self.schedule = schedule
        """Windows and depth in force."""
        self.foresight = foresight
        self._waiting: list[Callable[[], None]] = []
        self._partition = partition
        self._optimizers = optimizers
        self._trace: Trace | None = None
        self._trained: list[Any] = []
        self._installed = False
        self._own_forward: Callable[..., Any] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    # ----- taking the place of forward

    def install(self) -> None:
        """Take the place of ``module.forward``."""
        self._own_forward = vars(self.module).get("forward")
        self.module.forward = self._forward
        self._installed = True

    def uninstall(self) -> None:
        """Give ``module.forward`` back. Idempotent."""
        if not self._installed:
            return
        self._installed = False
        if self._own_forward is None:
            del vars(self.module)["forward"]
        else:
            self.module.forward = self._own_forward

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say why a copy of the module, which would hold this too, cannot be made."""
        raise PipelineError(
            f"{self.name} cannot be copied while it is pipelined, since the weights of later stages are with the"
            " workers; take them from trainer.strategy.lightning_module_state_dict()"
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        call = Call(args, kwargs, _autocast_dtype(self.pipeline_device))
        step = SuspendedStep.current()
        if step is not None and step.call is None:
            return step.wait_for_output(call)
        if not torch.is_grad_enabled():
            return self.evaluated(self.evaluate(call), self.module.training)
        if not self.module.training:
            return self._without_gradients(call)
        if step is not None:
            raise PipelineError(
                f"training_step calls the pipelined module {self.name} more than once; set"
                " AccEPTStrategy(in_flight=1) for that"
            )
        return self._synchronous(call)

    @property
    def pipeline_device(self) -> torch.device:
        """The central node's device."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    # ----- the stages

    def accepts(self, call: Call) -> bool:
        """Whether the stages in place can serve this call, and nothing waits for the pipeline to be drained."""
        return not self._waiting and self._serves(call)

    def _serves(self, call: Call) -> bool:
        """Whether the stages in place fit this call."""
        trained = self._trained == self._what_is_trained()
        return trained and self._trace is not None and self._trace.accepts(call.args, call.kwargs)

    def when_drained(self, action: Callable[[], None]) -> None:
        """Do something before the next batch that begins with nothing else in flight.

        No batch is begun ahead of its turn until then.
        """
        self._waiting.append(action)

    def prepare(self, call: Call) -> Trace:
        """Put stages in place that can serve this call. If that takes a new trace, nothing may be in flight."""
        if self._trace is not None and not self.pipeline.in_flight:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                action()
        if self._trace is not None and self._serves(call):
            return self._trace
        if self._trace is not None and self._trace.accepts(call.args, call.kwargs):
            log.info("parameters of %s were frozen, unfrozen or moved to another param group", self.name)
            self.gather()
            self.deploy(self.starts)
            return self._trace
        if self._trace is not None:
            log.info("%s is traced again: %s", self.name, self._trace.describe_mismatch(call.args, call.kwargs))
            self.gather()
        self.uninstall()
        try:
            self._trace = trace(self.module, call.args, call.kwargs, self._trace)
        finally:
            self.install()
        before = self.layers
        firsts = [before[start] for start in self.starts]
        self.chain = Chain.from_trace(self._trace)
        if self.foresight is None or (firsts and self.layers == before):
            self.deploy(self._choose(firsts))
        else:
            self._plan(self.foresight, call)
        return self._trace

    def deploy(self, starts: Sequence[int]) -> None:
        """Put the stages in place that begin with these layers."""
        assert self._trace is not None and self.chain is not None
        self.starts = list(starts)
        self.pipeline.deploy(
            self._trace, self.chain, self.starts, self.schedule, self._optimizers(), self.pipeline.workers
        )
        self._trained = self._what_is_trained()
        log.info("partition: %s", self.describe_partition())

    def move(self, forecast: Forecast) -> MoveReport:
        """Go over to another partition and schedule; only layers that change hands travel. Nothing may be in flight."""
        assert self._trace is not None and self.chain is not None and self.foresight is not None
        self.starts, self.schedule = forecast.starts, forecast.schedule
        workers = [self.pipeline.claimed[number] for number in forecast.workers]
        started = time.perf_counter()
        report = self.pipeline.move(self._trace, self.chain, self.starts, self.schedule, self._optimizers(), workers)
        self._trained = self._what_is_trained()
        self.foresight.deployed(forecast, time.perf_counter() - started)
        return report

    def _plan(self, foresight: Foresight, call: Call) -> None:
        """Measure all devices, and put the stages in place that suit them best."""
        assert self._trace is not None and self.chain is not None
        self._check_layers()
        if not isinstance(self._partition, str):
            foresight.fix_partition(resolve_partition(self._partition, self.layers, len(self.pipeline.claimed)))
        foresight.survey(self._trace, self.chain, self.pipeline, self._optimizers(), call.autocast)
        forecast = foresight.checked_plan()
        log.info("plan: %s", forecast.describe(self.layers))
        self.starts, self.schedule = forecast.starts, forecast.schedule
        workers = [self.pipeline.claimed[number] for number in forecast.workers]
        started = time.perf_counter()
        self.pipeline.deploy(self._trace, self.chain, self.starts, self.schedule, self._optimizers(), workers)
        self._trained = self._what_is_trained()
        foresight.deployed(forecast, time.perf_counter() - started)

    @property
    def layers(self) -> list[str]:
        """Names of all layers."""
        return [layer.name for layer in self.chain.layers] if self.chain is not None else []

    @property
    def partition(self) -> list[list[str]]:
        """Names of the layers of every stage, the central node's first."""
        if not self.starts:
            return []
        edges = [0, *self.starts, len(self.layers)]
        return [self.layers[first:last] for first, last in itertools.pairwise(edges)]

    def describe_partition(self) -> str:
        """The partition in one line."""
        places = ["central node", *(worker.name for worker in self.pipeline.workers)]
        parts = []
        for number, (layers, place) in enumerate(zip(self.partition, places, strict=True)):
            span = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
            parts.append(f"stage {number} ({place}): {span}")
        return "; ".join(parts)

    def gather(self) -> None:
        """Write the trained weights, buffers and optimizer state of all workers into the user's own objects."""
        if self._trace is None or not self.pipeline.deployed:
            return
        parameters, buffers, optimizers = self._trace.parameters, self._trace.buffers, self._optimizers()

        def restore(stage: int, state: StageState) -> None:
            restore_state(state, parameters, buffers, optimizers)

        self.pipeline.gather(restore)

    def _what_is_trained(self) -> list[Any]:
        """What workers know of the parameters beside their values: which ones are frozen, and their param groups."""
        groups = [[id(p) for p in group["params"]] for o in self._optimizers() for group in o.param_groups]
        return [[p.requires_grad for p in self.module.parameters()], groups]

    def _check_layers(self) -> None:
        workers, layers = len(self.pipeline.workers), self.layers
        if len(layers) <= workers:
            raise PipelineError(
                f"{self.name} has {len(layers)} layers ({', '.join(layers)}), too few for {workers} workers and the"
                f" central node; use at most {len(layers) - 1} workers"
            )

    def _choose(self, firsts: Sequence[str]) -> list[int]:
        self._check_layers()
        workers, layers = len(self.pipeline.workers), self.layers
        if isinstance(self._partition, str):
            if firsts and all(first in layers for first in firsts):
                return [layers.index(first) for first in firsts]  # a new trace alone is no reason to move layers
            assert self.chain is not None
            return balanced([layer.flops for layer in self.chain.layers], workers + 1)[1:]
        return resolve_partition(self._partition, layers, workers)

    # ----- calls

    def begin(self, call: Call, updates: bool) -> Ticket:
        """Begin a batch that is in flight until its gradient has come back.

        Raises:
            PipelineError: If an input requires grad: what lies before the pipelined module would have to be
                differentiated with weights that have changed since.
        """
        if not self.module.training:
            raise PipelineError(_EVAL_MODE.format(self.name))
        traced = self.prepare(call)
        inputs = traced.flatten(call.args, call.kwargs)
        if any(tensor.requires_grad for tensor in inputs):
            raise PipelineError(
                f"an input of the pipelined module {self.name} requires grad. Pipeline a module that includes what"
                " comes before it, with AccEPTStrategy(module=...), or set in_flight=1"
            )
        return self.pipeline.begin(inputs, updates=updates, autocast=call.autocast)

    def output(self, ticket: Ticket) -> tuple[Any, list[Tensor]]:
        """The output of a batch, in the module's own structure, and its tensors, which are leaves."""
        assert self._trace is not None
        leaves = [
            tensor.requires_grad_(wanted)
            for tensor, wanted in zip(self.pipeline.output(ticket), ticket.needs_grad, strict=True)
        ]
        return self._trace.unflatten(leaves, training=True), leaves

    def evaluate(self, call: Call) -> int:
        """Begin a forward without gradients; see :meth:`evaluated`."""
        traced = self.prepare(call)
        inputs = traced.flatten(call.args, call.kwargs)
        return self.pipeline.evaluate(inputs, training=self.module.training, autocast=call.autocast)

    def evaluated(self, number: int, training: bool) -> Any:
        """The output of a batch given to :meth:`evaluate`, in the module's own structure."""
        assert self._trace is not None
        return self._trace.unflatten(self.pipeline.evaluated(number), training=training)

    def _without_gradients(self, call: Call) -> Any:
        """A call in eval mode outside no_grad: its output can be used, but not differentiated."""
        traced = self.prepare(call)
        outputs = self.pipeline.evaluated(self.evaluate(call))
        inputs = traced.flatten(call.args, call.kwargs)
        if any(t.requires_grad for t in (*inputs, *self.module.parameters())):
            outputs = [
                _Undifferentiable.apply(self.name, self._anchor, output) if output.is_floating_point() else output
                for output in outputs
            ]
        return traced.unflatten(outputs, training=False)

    def _synchronous(self, call: Call) -> Any:
        traced = self.prepare(call)
        inputs = traced.flatten(call.args, call.kwargs)
        outputs = _SynchronousCall.apply(self, call.autocast, self._anchor, *inputs)
        return traced.unflatten(list(outputs), training=True)

    def add_gradients(self) -> None:
        """Move stage 0's gradients to where plain PyTorch has them."""
        assert self._trace is not None
        for name, gradient in self.pipeline.take_gradients().items():
            parameter = self._trace.parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient


class _SynchronousCall(torch.autograd.Function):
    """The pipelined call as one node of the user's autograd graph: forward and backward wait for the far end."""

    @staticmethod
    def forward(
        ctx: Any, owner: PipelinedModule, autocast: str | None, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Forward all stages; ``anchor`` requires grad, so that autograd calls :meth:`backward` in any case."""
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        ctx.ticket = owner.pipeline.begin(inputs, autocast=autocast, input_gradients=True)
        outputs = owner.pipeline.output(ctx.ticket)
        ctx.mark_non_differentiable(
            *(o for o, wanted in zip(outputs, ctx.ticket.needs_grad, strict=True) if not wanted)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Backward all stages; parameters of stage 0 get their gradients, those of later stages keep them there."""
        owner: PipelinedModule = ctx.owner
        if torch.is_grad_enabled():
            raise PipelineError(
                f"create_graph=True asks for second derivatives of the pipelined module {owner.name}, which the"
                " pipeline does not have; leave the gradient penalty out"
            )
        owner.pipeline.backward(ctx.ticket, gradients, None)
        owner.pipeline.complete(ctx.ticket)
        owner.add_gradients()
        return (None, None, None, *ctx.ticket.input_gradients)


class _Undifferentiable(torch.autograd.Function):
    """Says at the backward what could not be differentiated, rather than that a tensor does not require grad."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, output: Tensor) -> Tensor:
        """Pass ``output`` on."""
        ctx.name = name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Refuse."""
        raise PipelineError(_EVAL_MODE.format(ctx.name))


def _autocast_dtype(device: torch.device) -> str | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
