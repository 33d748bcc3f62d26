"""ImageDataModule: what the data modules of images share."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_accept.data.arrays import ArrayDataModule, Parts
from lightning_accept.data.split import split_train


class ImageDataModule(ArrayDataModule):
    """Images as bytes and labels, a part of the training images being held out for validation.

    Args:
        data_dir: Folder of the data.
        batch_size: Images per batch; twice as many without gradients.
        val_share: Part of the training images that is held out for validation, of each class alike.
        augment: Change images at random in training.
        num_workers: Processes that load data.
        stand_in: Use stand-in images, to try things out without a network.

    Raises:
        ValueError: If ``batch_size`` is below 1, or, in ``setup``, ``val_share`` not between 0 and 1.
    """

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 64,
        val_share: float = 0.1,
        augment: bool = True,
        num_workers: int = 0,
        stand_in: bool = False,
    ) -> None:
        super().__init__(data_dir, batch_size, num_workers, stand_in)
        self.val_share = val_share
        self.augment = augment

    def divide(self, images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor) -> Parts:
        """The parts ``train``, ``val`` and ``test`` of images ``[n, channels, height, width]`` and labels ``[n]``."""
        parts = {**split_train(images, labels, self.val_share), "test": (test_images, test_labels)}
        return {name: TensorDataset(images, labels) for name, (images, labels) in parts.items()}
