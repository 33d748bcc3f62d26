"""A stack of layers on a device, of which any run can be forwarded and backwarded as a stage does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_accept.graph import CutValue, StageModule, StageProgram
from lightning_accept.latency.dry_run import needs_grad
from lightning_accept.latency.stand_in import make_generator, make_like, make_parameter, make_values
from lightning_accept.latency.submodels import Span


@dataclass
class Pass:
    """One forward in train mode, ready for its backward."""

    outputs: list[Tensor]
    wanted: list[Tensor]


class Stack:
    """Runs sub-models by chaining one-layer programs, with made-up parameters and inputs.

    Unless told otherwise, only the layers of the sub-model at hand are held, so that a model larger than the device can
    be measured in parts.

    Args:
        layers: One program per layer.
        cuts: What enters each layer in train mode, and last the outputs.
        tensors: ``buffer/NAME`` and ``const/NAME``; buffers are copied, since training writes to them.
        device: Where to compute.
        autocast: Name of the autocast dtype, or None for none, whatever the caller runs under.
        channels_last: Lay images out with the channels last.
        keep: Hold everything that was made once.
    """

    def __init__(
        self,
        layers: Sequence[StageProgram],
        cuts: Sequence[Sequence[CutValue]],
        tensors: Mapping[str, Tensor],
        device: torch.device,
        autocast: str | None = None,
        channels_last: bool = False,
        keep: bool = False,
    ) -> None:
        self.device = device
        self._layers = layers
        self._cuts = cuts
        self._tensors = tensors
        self._autocast = None if autocast is None else getattr(torch, autocast)
        self._channels_last = channels_last
        self._keep = keep
        self._modules: dict[int, StageModule] = {}
        self._inputs: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._span: Span = (0, 0)

    def random(self) -> bool:
        """Whether a layer draws random numbers in train mode."""
        return any(layer.random(training=True) for layer in self._layers)

    def load(self, span: Span) -> None:
        """Make the layers and inputs of ``span`` ready, and drop all others unless they are to be kept."""
        first, stop = span
        if not self._keep:
            self._inputs.clear()
            self._gradients.clear()
            for index in [index for index in self._modules if not first <= index < stop]:
                del self._modules[index]
        for index in range(first, stop):
            if index not in self._modules:
                self._modules[index] = self._build(self._layers[index])
        self._span = span
        if first not in self._inputs:
            made = make_values(self._cuts[first], self.device, make_generator())
            self._inputs[first] = [
                self._laid_out(tensor).requires_grad_(needs_grad(value, first))
                for tensor, value in zip(made, self._cuts[first], strict=True)
            ]

    def release(self) -> None:
        """Drop everything."""
        self._inputs.clear()
        self._gradients.clear()
        self._modules.clear()

    def forward(self) -> Pass:
        """Forward the loaded layers in train mode."""
        first, stop = self._span
        # Without an argument the dtype would be looked up for the device, which is of no interest when disabled.
        region = torch.autocast(self.device.type, dtype=self._autocast or torch.bfloat16, enabled=bool(self._autocast))
        inputs = values = self._inputs[first]
        with torch.inference_mode(False), torch.enable_grad(), region:
            for index in range(first, stop):
                values = self._modules[index].run(values, training=True)
        leaves = [*inputs, *(p for index in range(first, stop) for p in self._modules[index].parameters.values())]
        return Pass(values, [leaf for leaf in leaves if leaf.requires_grad])

    def prepare_gradients(self, done: Pass) -> None:
        """Make up a gradient for every output that has one."""
        stop = self._span[1]
        if stop not in self._gradients:
            generator = make_generator()
            self._gradients[stop] = [
                make_like(output.detach(), generator) if output.requires_grad else None for output in done.outputs
            ]

    def backward(self, done: Pass) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and parameters; nothing accumulates in the parameters."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(done.outputs, self._gradients[self._span[1]], strict=True)
            if gradient is not None and output.requires_grad
        ]
        if not pairs or not done.wanted:
            return ()
        with torch.inference_mode(False):
            return torch.autograd.grad(
                [output for output, _ in pairs],
                done.wanted,
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )

    def _build(self, program: StageProgram) -> StageModule:
        generator = make_generator()
        parameters = {
            name: self._laid_out(make_parameter(name, info, self.device, generator))
            for name, info in program.parameters.items()
        }
        buffers = {name: self._tensors[f"buffer/{name}"].to(self.device, copy=True) for name in program.buffers}
        constants = {name: self._tensors[f"const/{name}"] for name in program.constant_infos}
        return StageModule(program, parameters, buffers, constants, self.device)

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if self._channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor
