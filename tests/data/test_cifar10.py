"""CIFAR-10 as a data module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch

from lightning_accept.data import CIFAR10DataModule, DataNotFoundError


@pytest.fixture
def data(data_files) -> CIFAR10DataModule:
    """The small files, read."""
    data = CIFAR10DataModule(str(data_files.folder), batch_size=16)
    data.prepare_data()
    data.setup("fit")
    return data


def test_files_are_read_and_split(data: CIFAR10DataModule) -> None:
    assert {name: tuple(part.tensors[0].shape) for name, part in data.parts.items()} == {
        "train": (180, 3, 32, 32),
        "val": (20, 3, 32, 32),
        "test": (40, 3, 32, 32),
    }
    assert data.parts["val"].tensors[1].bincount().tolist() == [2] * 10


def test_images_are_normalised_and_changed_in_training_only(data: CIFAR10DataModule) -> None:
    images, labels = data.parts["train"].tensors
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    plain = (images / 255 - mean[:, None, None]) / std[:, None, None]
    for training, same in ((False, True), (True, False)):
        data.trainer = SimpleNamespace(training=training)
        got, _ = data.on_after_batch_transfer((images, labels), 0)
        assert got.dtype == torch.float32 and got.shape == images.shape
        assert torch.allclose(got, plain, atol=1e-5) == same


def test_a_damaged_file_is_not_taken(data_files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", refuse)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for path in (data_files.folder / folder.name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    CIFAR10DataModule(str(tmp_path)).prepare_data()
    (folder / "data_batch_3").write_bytes(b"half")
    with pytest.raises(
        DataNotFoundError,
        match=r"no network.*Download https://.*cifar-10-python\.tar\.gz elsewhere and put it into .* as"
        r" cifar-10-python\.tar\.gz .*data\.init_args\.stand_in=true",
    ):
        CIFAR10DataModule(str(tmp_path)).prepare_data()


def test_stand_in(tmp_path: Path) -> None:
    data = CIFAR10DataModule(str(tmp_path / "nowhere"), stand_in=True)
    data.prepare_data()
    data.setup("fit")
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 900, "val": 100, "test": 200}
    assert data.parts["train"].tensors[0].dtype == torch.uint8
