"""Generated data that a network can learn, for trying things out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def patterns(shape: Sequence[int], classes: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A pattern per class, the same for every ``seed``, under noise.

    Args:
        shape: Of one sample.
        classes: Number of classes.
        count: Number of samples.
        seed: Of the noise.

    Returns:
        Float inputs ``[count, *shape]`` of zero mean and unit variance, and labels ``[count]``.
    """
    pattern = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % classes
    noise = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1 + seed))
    return (pattern[labels] + noise) / 2**0.5, labels
