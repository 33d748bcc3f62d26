"""Splitting data into parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stratified_split(labels: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """Indices into ``labels`` [n], one tensor per share, the same at every call; each label is split in these shares.

    The shares add up to 1.
    """
    generator = torch.Generator().manual_seed(0)
    parts: list[list[Tensor]] = [[] for _ in shares]
    for label in sorted(set(labels.tolist())):
        found = torch.nonzero(labels == label).flatten()
        found = found[torch.randperm(len(found), generator=generator)]
        bounds = [round(sum(shares[: n + 1]) * len(found)) for n in range(len(shares))]
        for part, start, stop in zip(parts, [0, *bounds], bounds, strict=False):
            part.append(found[start:stop])
    return [torch.cat(part) for part in parts]


def split_train(inputs: Tensor, labels: Tensor, val_share: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts ``train`` and ``val`` of inputs [n, ...] and labels [n].

    Raises:
        ValueError: If ``val_share`` is not between 0 and 1.
    """
    if not 0 < val_share < 1:
        raise ValueError(f"val_share={val_share}: give a number between 0 and 1, such as 0.1 for a tenth")
    train, val = stratified_split(labels, (1 - val_share, val_share))
    return {"train": (inputs[train], labels[train]), "val": (inputs[val], labels[val])}
