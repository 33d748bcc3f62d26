"""UCI-HAR as a data module."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import requests
import torch

from lightning_accept.data import DataNotFoundError, UCIHARDataModule
from lightning_accept.data.uci_har import FILE


@pytest.fixture
def data(data_files) -> UCIHARDataModule:
    """The data of the small archive, read."""
    data = UCIHARDataModule(str(data_files.folder), batch_size=16, val_subjects=2, sha256=data_files.har_sha256)
    data.prepare_data()
    data.setup("fit")
    return data


def test_persons_are_held_out_for_validation(data: UCIHARDataModule) -> None:
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 144, "val": 96, "test": 48}


def test_channels_are_normalised_by_what_is_learnt_from(data: UCIHARDataModule) -> None:
    signals, labels = data.parts["train"].tensors
    assert signals.dtype == torch.float32 and labels.dtype == torch.int64
    torch.testing.assert_close(signals.mean((0, 2)), torch.zeros(9), atol=1e-4, rtol=0)
    torch.testing.assert_close(signals.std((0, 2)), torch.ones(9), atol=1e-3, rtol=0)
    assert (data.parts["val"].tensors[0].mean((0, 2)).abs() > 0.1).all(), "their own mean is another one"


def test_batches(data: UCIHARDataModule) -> None:
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]
    assert [len(loader) for loader in loaders] == [9, 3, 2, 2]
    signals, labels = next(iter(loaders[0]))
    assert signals.shape == (16, 9, 128) and labels.shape == (16,)


@pytest.mark.parametrize("val_subjects", [0, 5])
def test_somebody_must_be_left(data_files, val_subjects: int) -> None:
    data = UCIHARDataModule(str(data_files.folder), val_subjects=val_subjects)
    with pytest.raises(ValueError, match=rf"val_subjects={val_subjects}: give a number from 1 to 4"):
        data.setup("fit")


def test_an_archive_with_another_digest_is_refused(data_files) -> None:
    with pytest.raises(ValueError, match=r"smartphones\.zip has the SHA-256 [0-9a-f]+ instead of c00b80.* or 2045e4"):
        UCIHARDataModule(str(data_files.folder)).prepare_data()


def test_download(data_files, served, tmp_path: Path) -> None:
    url, folder = served
    shutil.copy(data_files.folder / FILE, folder / "har.zip")
    target = tmp_path / "data"
    data = UCIHARDataModule(str(target), url=f"{url}/har.zip", sha256=data_files.har_sha256)
    data.prepare_data()
    assert [path.name for path in target.iterdir()] == [FILE]
    (folder / "har.zip").unlink()
    data.prepare_data()  # once is enough
    data.setup("fit")
    assert len(data.parts["test"]) == 48


def test_without_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise requests.ConnectionError("a long story")

    monkeypatch.setattr(requests, "get", refuse)
    with pytest.raises(
        DataNotFoundError,
        match=r"no connection to archive\.ics\.uci\.edu\)\. Download https://.*\.zip elsewhere and put it, as it is, at"
        r" .*smartphones\.zip; or use generated windows, with data\.init_args\.stand_in=true",
    ):
        UCIHARDataModule(str(tmp_path)).prepare_data()


def test_reading_needs_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"call prepare_data\(\) first"):
        UCIHARDataModule(str(tmp_path)).setup("fit")


def test_stand_in(tmp_path: Path) -> None:
    data = UCIHARDataModule(str(tmp_path / "nowhere"), stand_in=True)
    data.prepare_data()
    data.setup("fit")
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 1000, "val": 200, "test": 240}
    assert data.parts["train"].tensors[0].shape == (1000, 9, 128)
    assert not (tmp_path / "nowhere").exists()
