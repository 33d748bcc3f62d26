"""Shapes, dtypes and memory of a chain of layers, found by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_accept.graph import CutValue, StageModule, StageProgram


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        cuts: What enters each layer in train mode, and last what the last one gives; with the real shapes and dtypes.
        layer_bytes: Memory that training each layer takes: weights, their gradients, and what its backward needs.
    """

    cuts: tuple[tuple[CutValue, ...], ...]
    layer_bytes: tuple[int, ...]


def dry_run(
    layers: Sequence[StageProgram],
    cuts: Sequence[Sequence[CutValue]],
    autocast: str | None = None,
) -> DryRun:
    """Run the layers one after the other in train mode without data; takes milliseconds per layer and no memory.

    Args:
        layers: One program per layer.
        cuts: As traced. The shapes of the first are taken as they are; all others are found.
        autocast: Name of the autocast dtype, under which activations may have other dtypes than traced.

    Raises:
        Exception: Whatever PyTorch raises where the model cannot be run with these shapes.
    """
    # Imports sympy, which workers are spared; they receive what was found here.
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = torch.device("cpu")
    found = [tuple(cuts[0])]
    sizes = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(False), torch.enable_grad():
        for index, program in enumerate(layers):
            infos = {**program.parameters, **program.buffers, **program.constant_infos}
            stored = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
            module = StageModule(program, stored, stored, stored, device)
            inputs = [
                torch.empty(value.shape, dtype=value.dtype).requires_grad_(needs_grad(value, index))
                for value in found[index]
            ]
            ledger = _Ledger([*stored.values(), *module.parameters.values()])
            region = torch.autocast("cpu", dtype=getattr(torch, autocast or "bfloat16"), enabled=autocast is not None)
            with region, torch.autograd.graph.saved_tensors_hooks(ledger.keep, _same):
                outputs = module.run(inputs, training=True)
            found.append(
                tuple(
                    replace(value, shape=tuple(output.shape), dtype=output.dtype)
                    for value, output in zip(cuts[index + 1], outputs, strict=True)
                )
            )
            weights = sum(
                p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in module.parameters.values()
            )
            others = sum(stored[name].nbytes for name in stored if name not in program.parameters)
            sizes.append(weights + others + ledger.nbytes)
    return DryRun(tuple(found), tuple(sizes))


def needs_grad(value: CutValue, cut: int) -> bool:
    """Whether a stage that begins at ``cut`` computes the gradient of this input; of the model's own it does not."""
    return cut > 0 and value.differentiable and value.floating


class _Ledger:
    """Adds up the tensors that autograd keeps for the backward, each storage once, the weights left out."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.nbytes = 0
        # The tensors themselves are held, so that no storage is taken for an older one at the same address.
        self._held = list(known)
        self._seen = {_storage(tensor) for tensor in known}

    def keep(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._seen:
            self._seen.add(_storage(tensor))
            self._held.append(tensor)
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same(tensor: Tensor) -> Tensor:
    return tensor
