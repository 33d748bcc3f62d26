"""Weight prediction: the weights that a batch will meet when its update comes (SpecTrain; AccEPT on FTPipeHD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@torch.no_grad()
def predict_weights(optimizers: Sequence[Optimizer | None], updates: float) -> dict[nn.Parameter, Tensor]:
    """Weights expected ``updates`` optimizer steps from now, if the momentum stays as it is; parts of steps count.

    SGD with momentum moves by ``lr * v`` per step, ``v`` the momentum buffer. Adam-like optimizers move by
    ``lr * m_hat / (sqrt(v_hat) + eps)``, and AdamW's decoupled decay by ``lr * weight_decay * w`` besides.
    Optimizers without momentum predict no move.

    Returns:
        New tensors for those parameters that are expected to move; parameters that are missing stay as they are.
    """
    predicted: dict[nn.Parameter, Tensor] = {}
    if updates <= 0:
        return predicted
    for optimizer in optimizers:
        if optimizer is None:
            continue
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 0.0))
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if rate == 0.0 or not state or not parameter.requires_grad:
                    continue
                move = _move(state, group, parameter)
                if move is not None:
                    predicted[parameter] = parameter.detach().sub(move.to(parameter.dtype), alpha=updates * rate)
    return predicted


def _move(state: dict[str, Tensor], group: dict[str, Any], parameter: nn.Parameter) -> Tensor | None:
    """The expected step divided by the learning rate, or None where the optimizer keeps no momentum."""
    momentum = state.get("momentum_buffer")
    if momentum is not None:
        return momentum
    first, second, step = state.get("exp_avg"), state.get("exp_avg_sq"), state.get("step")
    betas = group.get("betas")
    if first is None or second is None or step is None or not isinstance(betas, (tuple, list)):
        return None
    count = float(step)
    correction = 1 - float(betas[0]) ** count
    scale = (second / (1 - float(betas[1]) ** count)).sqrt_().add_(float(group["eps"]))
    move: Tensor = (first / correction).div_(scale)
    decay = float(group.get("weight_decay") or 0.0)
    if decay and group.get("decoupled_weight_decay"):
        move = move.add_(parameter.detach(), alpha=decay)
    return move
