"""Ticket: one batch on its way through the pipeline, as the central node sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_accept.pipeline.clipping import Clips
from lightning_accept.pipeline.micro_batch import Pieces

Update = list[list[Any]]
"""Optimizer steps to take: pairs of optimizer index and hyper-parameters of its param groups."""


@dataclass
class Ticket:
    """One pipelined call in train mode, from its forward to its backward.

    Attributes:
        batch: Number of the batch.
        jobs: Numbers of its jobs, one per micro-batch.
        pieces: How the batch was split.
        epoch: The training epoch that it belongs to.
        update: The optimizer steps that end it.
        clips: What is done to the gradients before these.
        backwarded: The output's gradient is on its way.
        completed: The backward of stage 0 is done.
        needs_grad: For every output whether it takes a gradient; known once the output has returned.
        returned: When its output was there, in seconds; None before.
        input_gradients: For every input its gradient, where one was asked for; known once completed.
    """

    batch: int
    jobs: list[int]
    pieces: Pieces
    epoch: int = 0
    update: Update | None = None
    clips: Clips = field(default_factory=list)
    backwarded: bool = False
    completed: bool = False
    needs_grad: list[bool] = field(default_factory=list)
    returned: float | None = None
    input_gradients: list[Tensor | None] = field(default_factory=list)
