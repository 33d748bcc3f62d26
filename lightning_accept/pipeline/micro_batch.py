"""Splits a batch into micro-batches and joins what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """A batch in micro-batches.

    Attributes:
        parts: For each micro-batch the tensor inputs; None for a micro-batch without a sample.
        sizes: For each micro-batch its number of samples.
    """

    parts: list[list[Tensor] | None]
    sizes: list[int]


def split(inputs: Sequence[Tensor], count: int) -> Pieces:
    """Split inputs along the first dimension into exactly ``count`` micro-batches of nearly equal size.

    The batch size is the first input's. Inputs of another first dimension (and 0-d ones) go whole to every
    micro-batch. A batch smaller than ``count`` leaves the last micro-batches empty, because every stage counts on
    ``count`` jobs per batch.
    """
    if count == 1:
        return Pieces([list(inputs)], [inputs[0].shape[0] if inputs and inputs[0].dim() else 1])
    batched = next((tensor.shape[0] for tensor in inputs if tensor.dim()), None)
    if batched is None:
        raise ValueError("micro_batches needs an input with a batch dimension")
    base, rest = divmod(batched, count)
    sizes = [base + (index < rest) for index in range(count)]
    parts: list[list[Tensor] | None] = []
    start = 0
    for size in sizes:
        end = start + size
        piece = [t[start:end] if t.dim() and t.shape[0] == batched else t for t in inputs]
        parts.append(piece if size else None)
        start = end
    return Pieces(parts, sizes)


def join(parts: Sequence[Sequence[Tensor]], pieces: Pieces) -> list[Tensor]:
    """Concatenate the outputs of the micro-batches along the first dimension.

    Raises:
        ValueError: If an output has no batch dimension.
    """
    if len(pieces.sizes) == 1:
        return list(parts[0])
    sizes = [size for size in pieces.sizes if size]
    joined = []
    for index, column in enumerate(zip(*parts, strict=True)):
        if any(tensor.dim() == 0 or tensor.shape[0] != size for tensor, size in zip(column, sizes, strict=True)):
            raise ValueError(
                f"output {index} of the module has shape {tuple(column[0].shape)} for a micro-batch of {sizes[0]}"
                " samples, so micro-batches cannot be joined; set micro_batches=1"
            )
        joined.append(torch.cat(list(column)))
    return joined


def split_like(tensors: Sequence[Tensor | None], pieces: Pieces) -> list[list[Tensor | None]]:
    """Split gradients of joined outputs into those of the micro-batches; nothing for an empty micro-batch."""
    if len(pieces.sizes) == 1:
        return [list(tensors)]
    parts: list[list[Tensor | None]] = []
    start = 0
    for size in pieces.sizes:
        end = start + size
        parts.append([None if t is None else t[start:end] for t in tensors] if size else [])
        start = end
    return parts


def join_gradients(parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """For every input its gradient from those of all micro-batches; None where none has one."""
    joined: list[Tensor | None] = []
    for column in zip(*parts, strict=True):
        present = [gradient for gradient in column if gradient is not None]
        joined.append(present[0] if len(present) == 1 else torch.cat(present) if present else None)
    return joined
