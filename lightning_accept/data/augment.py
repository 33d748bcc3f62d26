"""Random changes of a batch of images, each image in its own way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Shift images ``[batch, channels, height, width]`` by up to ``padding`` pixels; zeros come in from outside."""
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, [padding] * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1), device=device)
    rows = (top + torch.arange(height, device=device))[:, None, :, None]
    columns = (left + torch.arange(width, device=device))[:, None, None, :]
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[image, channel, rows, columns]


def random_flip(images: Tensor) -> Tensor:
    """Mirror every other image, on average, left to right."""
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(3), images)
