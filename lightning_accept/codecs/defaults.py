"""The codecs that ``auto`` stands for."""

from __future__ import annotations

from lightning_accept.codecs.base import Codec
from lightning_accept.codecs.multibit import MultiBit
from lightning_accept.codecs.stochastic import StochasticUniform

# The fewest bytes at which benchmarks/convergence.py found no more than half a point lost on any of its data, in the
# mean of its two runs (benchmarks/README.md).


def default_forward() -> Codec:
    """For activations."""
    return MultiBit(4, levels="signed")


def default_backward() -> Codec:
    """For gradients."""
    return StochasticUniform(8)
