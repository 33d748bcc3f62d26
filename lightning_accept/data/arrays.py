"""ArrayDataModule: data that fits into memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

Parts = dict[str, TensorDataset]


class ArrayDataModule(LightningDataModule):
    """Inputs and labels as tensors, in parts ``train``, ``val`` and ``test``.

    Args:
        data_dir: Folder of the data.
        batch_size: Samples per batch; twice as many without gradients.
        num_workers: Processes that load data; 0 for none, which is best for data that is in memory anyway.
        stand_in: Use stand-in data instead, to try things out without a network.
    """

    def __init__(self, data_dir: str, batch_size: int, num_workers: int, stand_in: bool) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give a number from 1")
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.stand_in = stand_in
        self.parts: Parts = {}

    @abstractmethod
    def fetch(self) -> None:
        """Make sure that the data is in ``data_dir``.

        Raises:
            DataNotFoundError: If it is not, and cannot be downloaded.
        """

    @abstractmethod
    def read(self) -> Parts:
        """The data that :meth:`fetch` left."""

    @abstractmethod
    def read_stand_in(self) -> Parts:
        """Something of the same shapes and types."""

    @override
    def prepare_data(self) -> None:
        if not self.stand_in:
            self.fetch()

    @override
    def setup(self, stage: str) -> None:
        if not self.parts:
            self.parts = self.read_stand_in() if self.stand_in else self.read()

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; an incomplete last batch is left out, for BatchNorm's sake."""
        return self._loader("train", self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val", 2 * self.batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test", 2 * self.batch_size)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()

    @override
    def on_after_batch_transfer(self, batch: Sequence[Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        return self.transform(inputs, self.trainer is not None and self.trainer.training), labels

    def transform(self, inputs: Tensor, training: bool) -> Tensor:
        """What happens to a batch of inputs on the central node's device; nothing by default."""
        return inputs

    def _loader(self, part: str, batch_size: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            self.parts[part],
            batch_size=batch_size,  # by name, without which Lightning's predict fails
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            **options,
        )
