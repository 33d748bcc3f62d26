"""Stage 0: the central node's own, made of the user's parameters and stepped by the user's optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accept.graph import Chain, StageModule, Trace
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.buffer_history import BufferHistory
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.stage import StageExecutor


def build_stage0(
    trace: Trace,
    chain: Chain,
    stop: int,
    schedule: Schedule,
    optimizers: Sequence[Optimizer],
    settings: Settings,
    device: torch.device,
) -> StageExecutor:
    """The executor of the layers before ``stop``.

    With batches in flight the user's buffers hold what belongs to the weights of the moment: no batch changes them
    before its backward. Forwards go on with copies.
    """
    program = chain.program(0, stop)
    shown = {name: trace.buffers[name] for name in (() if schedule.synchronous else program.changing_buffers())}
    with torch.inference_mode(False):  # the first batch may be one of validation, the copies are for training too
        copies = {name: buffer.detach().clone() for name, buffer in shown.items()}
    module = StageModule(
        program,
        {name: trace.parameters[name] for name in program.parameters},
        {name: copies.get(name, trace.buffers[name]) for name in program.buffers},
        program.constants,
        device,
    )
    return StageExecutor(
        module,
        # In synchronous mode the Trainer's own optimizer step updates stage 0, so that every hook of Lightning sees its
        # gradients where plain training has them.
        [] if schedule.synchronous else optimizers,
        weight_prediction=settings.weight_prediction and not schedule.synchronous,
        scale_lr=settings.scale_lr and not schedule.synchronous,
        seed=None if schedule.synchronous else settings.seed,
        stage=0,
        shared_optimizers=True,
        history=BufferHistory(copies, shown),
    )


class UserGradients:
    """In synchronous mode: stage 0's gradients, which lie in the user's ``parameter.grad``.

    Knows which of them wait for their optimizer step. What a step has used stays in ``grad`` until the next
    ``zero_grad()``, as in plain training, but is worth nothing to another stage.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizers: Sequence[Optimizer] = ()
        self._waiting: set[str] = set()

    def added(self, names: Iterable[str]) -> None:
        """A backward adds to the gradients of these parameters."""
        self._waiting.update(names)

    def done(self, indices: Collection[int]) -> None:
        """These optimizers have taken their step, or their gradients were dropped."""
        self._waiting -= self._belonging_to(indices)

    def waiting(self) -> dict[str, Tensor]:
        """The gradients that wait for their optimizer step, by parameter name."""
        gradients = {name: self._parameters[name].grad for name in sorted(self._waiting)}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def settle_in(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        gradients: Mapping[str, Tensor],
        zeroed: Collection[int],
    ) -> None:
        """Stage 0 consists of ``parameters`` from now on.

        Args:
            parameters: They, by name; none of them in the other mode.
            optimizers: The user's optimizers.
            gradients: Gradients that wait for their optimizer step, of parameters of any stage.
            zeroed: Optimizers whose gradients the user has dropped without workers knowing yet.
        """
        for name, parameter in self._parameters.items():
            if name not in parameters:
                parameter.grad = None  # the stage that holds it now has it, and the user's step is to pass it over
        self._parameters, self._optimizers = dict(parameters), optimizers
        dropped = self._belonging_to(zeroed)
        self._waiting = {name for name in gradients if name in parameters and name not in dropped}
        for name in self._waiting:
            parameter = parameters[name]
            parameter.grad = gradients[name].to(parameter.device)

    def _belonging_to(self, indices: Collection[int]) -> set[str]:
        if not self._parameters:
            return set()  # before the first deployment the optimizers are not known either
        owned = {p for index in indices for group in self._optimizers[index].param_groups for p in group["params"]}
        return {name for name, parameter in self._parameters.items() if parameter in owned}
