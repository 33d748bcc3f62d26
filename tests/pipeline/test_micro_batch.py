"""Splitting and joining batches."""

from __future__ import annotations

import pytest
import torch

from lightning_accept.pipeline.micro_batch import join, split, split_like


@pytest.mark.parametrize(("batch", "count"), [(8, 4), (7, 3), (2, 4), (1, 1), (5, 5)])
def test_joining_undoes_splitting(batch: int, count: int) -> None:
    x, y = torch.randn(batch, 3), torch.arange(batch)
    pieces = split([x, y], count)
    assert len(pieces.parts) == count
    joined = join([part for part in pieces.parts if part is not None], pieces)
    assert torch.equal(joined[0], x)
    assert torch.equal(joined[1], y)


def test_a_small_batch_leaves_micro_batches_empty() -> None:
    pieces = split([torch.zeros(2, 1)], 4)
    assert pieces.sizes == [1, 1, 0, 0]
    assert pieces.parts[2:] == [None, None]


def test_an_input_of_another_first_dimension_goes_whole_to_each() -> None:
    mask = torch.ones(5, 5)
    pieces = split([torch.zeros(4, 5), mask, torch.tensor(1.0)], 2)
    for part in pieces.parts:
        assert part is not None
        assert part[1] is mask
        assert part[2].dim() == 0


def test_gradients_are_split_as_the_batch_was() -> None:
    gradient = torch.randn(5, 2)
    pieces = split([torch.zeros(5)], 3)
    parts = split_like([gradient, None], pieces)
    assert [len(part[0]) for part in parts if part[0] is not None] == [2, 2, 1]
    assert all(part[1] is None for part in parts)
    assert torch.equal(torch.cat([part[0] for part in parts if part[0] is not None]), gradient)


def test_an_output_without_batch_dimension_is_refused_with_the_cure() -> None:
    pieces = split([torch.zeros(4)], 2)
    with pytest.raises(ValueError, match="micro_batches=1"):
        join([[torch.tensor(1.0)], [torch.tensor(2.0)]], pieces)
