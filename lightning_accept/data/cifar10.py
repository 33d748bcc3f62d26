"""CIFAR-10: photographs of ten kinds of things."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10
from typing_extensions import override

from lightning_accept.data.arrays import Parts
from lightning_accept.data.augment import random_crop, random_flip
from lightning_accept.data.errors import DataNotFoundError
from lightning_accept.data.images import ImageDataModule
from lightning_accept.data.stand_in import patterns

# Of the training images' red, green and blue, scaled to 0..1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR10DataModule(ImageDataModule):
    """50,000 photographs to learn from and 10,000 to test with: float ``[batch, 3, 32, 32]`` and labels ``[batch]``.

    Torchvision downloads them and checks their digests. Images are normalised; in training they are also shifted by up
    to four pixels and mirrored.

    Args:
        data_dir: Folder; the files are in ``cifar-10-batches-py`` below it.
        batch_size: Images per batch; twice as many without gradients.
        val_share: Part of the training images that is held out for validation, of each class alike.
        augment: Shift and mirror images in training.
        num_workers: Processes that load data.
        stand_in: Use 1,200 generated images of the same shape.

    Raises:
        ValueError: If ``batch_size`` is below 1, or, in ``setup``, ``val_share`` not between 0 and 1.
    """

    @override
    def fetch(self) -> None:
        try:
            CIFAR10(self.data_dir, train=True, download=True)
        except (OSError, RuntimeError) as error:
            raise DataNotFoundError(
                f"CIFAR-10 is not in {self.data_dir} and could not be downloaded ({error}). Download {CIFAR10.url}"
                f" elsewhere and put it into {self.data_dir} as {CIFAR10.filename} (or unpacked, as"
                f" {Path(self.data_dir, CIFAR10.base_folder)}); or use generated images, with"
                " data.init_args.stand_in=true"
            ) from error

    @override
    def read(self) -> Parts:
        train, test = (CIFAR10(self.data_dir, train=train) for train in (True, False))
        return self.divide(_images(train), torch.tensor(train.targets), _images(test), torch.tensor(test.targets))

    @override
    def read_stand_in(self) -> Parts:
        (images, labels), (test_images, test_labels) = (
            patterns((3, 32, 32), 10, count, seed) for seed, count in enumerate((1000, 200))
        )
        return self.divide(_bytes(images), labels, _bytes(test_images), test_labels)

    @override
    def transform(self, inputs: Tensor, training: bool) -> Tensor:
        images = random_flip(random_crop(inputs, 4)) if training and self.augment else inputs
        mean, std = (images.new_tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (MEAN, STD))
        return images.float().div_(255).sub_(mean).div_(std)


def _images(part: CIFAR10) -> Tensor:
    return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()


def _bytes(values: Tensor) -> Tensor:
    return (128 + 50 * values).clamp_(0, 255).to(torch.uint8)
