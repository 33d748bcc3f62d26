"""Writes the state of remote stages back into the user's own module and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accept.pipeline import optimizers as optim
from lightning_accept.pipeline.messages import PipelineError, StageState


@torch.no_grad()
def restore_state(
    state: StageState,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
) -> None:
    """Put the parameters, buffers and optimizer state of one stage where plain training has them.

    Raises:
        PipelineError: If the state does not fit the module.
    """
    for full_name, tensor in state.tensors.items():
        section, _, name = full_name.partition("/")
        target = {"param": parameters, "buffer": buffers}.get(section, {}).get(name)
        if section in ("optim", "grad"):
            continue
        if target is None or target.shape != tensor.shape:
            raise PipelineError(f"gathered {section} {name!r} of shape {tuple(tensor.shape)} does not fit the module")
        target.copy_(tensor)
    optim.unpack_state(list(optimizers), dict(parameters), state.spec["optimizers"], state.tensors)


def gradients_in(state: StageState) -> dict[str, Tensor]:
    """The gradients that wait for their optimizer step, by parameter name."""
    return {name.removeprefix("grad/"): t for name, t in state.tensors.items() if name.startswith("grad/")}
