"""Made-up tensors of given shapes, for measuring: times do not depend on the values as long as they stay ordinary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_accept.graph import CutValue
from lightning_accept.graph.program import ParameterInfo

SEED = 0


def make_generator() -> torch.Generator:
    """A source of random numbers of its own, so that nobody else's random state is disturbed."""
    return torch.Generator().manual_seed(SEED)


def make_parameter(name: str, info: ParameterInfo, device: torch.device, generator: torch.Generator) -> Tensor:
    """A parameter that keeps activations and gradients within a few powers of ten, as trained weights do.

    Weights with two or more dimensions are normal with variance 2 / fan-in (He et al. 2015), so that neither
    denormal numbers (which CPUs compute slowly) nor infinities arise in deep models; scales are 1 and biases 0.

    Args:
        name: Its canonical name; one that ends in ``bias`` is a bias.
        info: Shape and dtype.
        device: Where it is to lie.
        generator: On the CPU.
    """
    if not info.dtype.is_floating_point:
        return torch.zeros(info.shape, dtype=info.dtype, device=device)
    if len(info.shape) < 2:
        value = 0.0 if name.rpartition(".")[2].startswith("bias") else 1.0
        return torch.full(info.shape, value, dtype=info.dtype, device=device)
    fan_in = max(1, math.prod(info.shape[1:]))
    return _normal(info.shape, info.dtype, device, generator).mul_(math.sqrt(2.0 / fan_in))


def make_values(values: Sequence[CutValue], device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """What could cross a cut: standard normal floats, zeros where indices or masks are wanted."""
    made = []
    for value in values:
        if value.floating:
            made.append(_normal(value.shape, value.dtype, device, generator))
        else:
            made.append(torch.zeros(value.shape, dtype=value.dtype, device=device))
    return made


def make_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A standard normal tensor with the shape, dtype, device and memory layout of ``tensor``, for a gradient."""
    made = torch.empty_like(tensor)
    return made.copy_(_normal(tuple(tensor.shape), tensor.dtype, tensor.device, generator))


def _normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator).to(device, dtype)
