"""Random changes of images."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lightning_accept.data.augment import random_crop, random_flip


def test_crops_are_shifts_each_its_own() -> None:
    image = torch.arange(1.0, 2 * 5 * 6 + 1).view(1, 2, 5, 6)
    shifts = {
        (top, left): F.pad(image, [2] * 4)[0, :, top : top + 5, left : left + 6]
        for top in range(5)
        for left in range(5)
    }
    seen = set()
    for crop in random_crop(image.expand(300, -1, -1, -1), 2):
        (found,) = [shift for shift, expected in shifts.items() if torch.equal(crop, expected)]
        seen.add(found)
    assert seen == set(shifts), "in 300 images, every shift is to be expected"


def test_crop_without_padding_changes_nothing() -> None:
    images = torch.randint(256, (3, 1, 4, 4), dtype=torch.uint8)
    assert torch.equal(random_crop(images, 0), images)


def test_about_half_is_mirrored() -> None:
    image = torch.rand(1, 3, 4, 4)
    flips = random_flip(image.expand(200, -1, -1, -1))
    mirrored = [torch.equal(flip, image[0].flip(2)) for flip in flips]
    assert all(torch.equal(flip, image[0]) for flip, is_it in zip(flips, mirrored, strict=True) if not is_it)
    assert 60 < sum(mirrored) < 140
