"""Lightning's gradient clipping, extended from the central node's gradients to those of all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_accept.pipeline.clipping import CentralClipping, squared_norm
from lightning_accept.stand_ins import StandIns


def watch_clipping(
    stand_ins: StandIns, precision: Precision, clipping: CentralClipping, index_of: Callable[[Optimizer], int]
) -> None:
    """Clip the gradients of workers whenever Lightning, or the user through it, clips those of an optimizer.

    Args:
        stand_ins: Where to put the stand-ins.
        precision: The plugin that clips in the end, whoever asked for it.
        clipping: Told what to do to the gradients of other stages.
        index_of: The number of an optimizer.
    """
    clip_here = precision.clip_grad_by_value

    def number(optimizer: Any) -> int:
        return index_of(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)

    def gradients_here(optimizer: Optimizer) -> list[Tensor]:
        return [p.grad for p in precision.main_params(optimizer) if p.grad is not None]

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        if gradients_here(optimizer):  # torch takes offence at none, and in flight all of them may be the stages'
            clip_here(optimizer, clip_val)
        clipping.by_value(number(optimizer), clip_val)

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        gradients = gradients_here(optimizer)
        scale = clipping.by_norm(number(optimizer), clip_val, squared_norm(gradients))
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale)

    stand_ins.put(precision, "clip_grad_by_value", clip_grad_by_value)
    stand_ins.put(precision, "clip_grad_by_norm", clip_grad_by_norm)
