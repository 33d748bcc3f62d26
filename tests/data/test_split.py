"""Splitting data into parts."""

from __future__ import annotations

import torch

from lightning_accept.data.split import split_train, stratified_split


def test_the_same_every_time_and_nothing_lost() -> None:
    labels = torch.arange(7).repeat_interleave(torch.tensor([10, 20, 11, 1, 3, 50, 7]))
    parts, again = (stratified_split(labels, (0.5, 0.3, 0.2)) for _ in range(2))
    assert all(torch.equal(first, second) for first, second in zip(parts, again, strict=True))
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))
    assert labels[parts[0]].bincount().tolist()[:2] == [5, 10]


def test_inputs_keep_their_labels() -> None:
    labels = torch.arange(32) % 4
    parts = split_train(labels * 10, labels, 0.25)
    assert {name: len(inputs) for name, (inputs, _) in parts.items()} == {"train": 24, "val": 8}
    assert all(torch.equal(inputs, labels * 10) for inputs, labels in parts.values())
