"""Generated data."""

from __future__ import annotations

import torch

from lightning_accept.data.stand_in import patterns


def test_what_one_seed_teaches_holds_for_another() -> None:
    (x, y), (x_test, y_test) = (patterns((3, 8, 8), 5, 200, seed) for seed in (0, 1))
    assert x.shape == (200, 3, 8, 8) and y.bincount().tolist() == [40] * 5
    assert not torch.equal(x, x_test)
    centres = torch.stack([x[y == label].mean(0) for label in range(5)]).flatten(1)
    nearest = torch.cdist(x_test.flatten(1), centres).argmin(1)
    assert (nearest == y_test).float().mean() > 0.95


def test_scale() -> None:
    x, _ = patterns((9, 128), 6, 300, 0)
    assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05
