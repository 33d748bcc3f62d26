"""The regressor of two streams and four fully connected layers (AccEPT, arXiv 2311.05827), as a small ensemble."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MemberLinear(nn.Module):
    """A fully connected layer for each member of an ensemble.

    Args:
        members: Number of members.
        inputs: Features in.
        outputs: Features out.
        gain: Standard deviation of the output at the start, for inputs of standard deviation 1.
        generator: Source of the initial weights.
    """

    def __init__(self, members: int, inputs: int, outputs: int, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = torch.randn(members, inputs, outputs, generator=generator) * gain / math.sqrt(inputs)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``[members or 1, N, inputs]`` to ``[members, N, outputs]``."""
        return torch.matmul(x, self.weight) + self.bias


class DualStream(nn.Module):
    """Two layers on the sub-model's mask s; their output joined with the device's h; two more layers to the outputs.

    Joining and the third layer are done as the sum of its two parts, so that all sub-models are combined with all
    devices without building every pair. The outputs start at zero.

    Args:
        layers: Number of layers of the model, the size of s.
        profile: Number of values of h.
        members: Size of the ensemble.
        width: Units of the first and second layer.
        joined: Units of the third layer.
        outputs: Values predicted per pair.
        seed: Of the initial weights.
    """

    def __init__(
        self,
        layers: int,
        profile: int,
        members: int = 4,
        width: int = 32,
        joined: int = 48,
        outputs: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = MemberLinear(members, layers, width, math.sqrt(2), generator)
        self.second = MemberLinear(members, width, width, math.sqrt(2), generator)
        self.third = MemberLinear(members, width + profile, joined, math.sqrt(2), generator)
        self.last = MemberLinear(members, joined, outputs, 0.0, generator)
        self.sizes = {
            "layers": layers,
            "profile": profile,
            "members": members,
            "width": width,
            "joined": joined,
            "outputs": outputs,
        }

    def forward(self, masks: Tensor, profiles: Tensor) -> Tensor:
        """Every sub-model on every device.

        Args:
            masks: s of each of M sub-models, ``[M, layers]``.
            profiles: h of each of D devices for each member, ``[members or 1, D, profile]``.

        Returns:
            ``[members, D, M, outputs]``.
        """
        hidden = nn.functional.gelu(self.second(nn.functional.gelu(self.first(masks[None]))))
        width = hidden.shape[-1]
        of_mask = torch.matmul(hidden, self.third.weight[:, :width])
        of_profile = torch.matmul(profiles, self.third.weight[:, width:]) + self.third.bias
        joined = nn.functional.gelu(of_mask[:, None] + of_profile[:, :, None])
        outputs: Tensor = self.last(joined.flatten(1, 2))
        return outputs.reshape(*joined.shape[:3], -1)
