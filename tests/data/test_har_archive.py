"""The archive of UCI-HAR, read from files of its format."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_accept.data.har_archive import read_archive

NAME = "human+activity+recognition+using+smartphones.zip"


@pytest.fixture
def inner(data_files, tmp_path: Path) -> Path:
    """The archive that lies inside the other."""
    with zipfile.ZipFile(data_files.folder / NAME) as archive:
        return Path(archive.extract("UCI HAR Dataset.zip", tmp_path))


@pytest.fixture
def changed(inner: Path, tmp_path: Path) -> Callable[[str, str | None], Path]:
    """Writes a copy of the archive in which one file has another content, or is missing."""

    def change(name: str, text: str | None) -> Path:
        path = tmp_path / "changed.zip"
        with zipfile.ZipFile(inner) as source, zipfile.ZipFile(path, "w") as target:
            for item in source.namelist():
                if item == f"UCI HAR Dataset/{name}":
                    if text is not None:
                        target.writestr(item, text)
                elif not item.startswith("__MACOSX"):
                    target.writestr(item, source.read(item))
        return path

    return change


def test_every_number_is_where_it_belongs(data_files) -> None:
    parts = read_archive(data_files.folder / NAME)
    for part, count in (("train", 240), ("test", 48)):
        windows = parts[part]
        assert windows.signals.shape == (count, 9, 128) and windows.signals.dtype == np.float32
        expected = np.arange(count)[:, None] + np.arange(9) / 10
        np.testing.assert_allclose(windows.signals[:, :, 0], expected, rtol=1e-5)
        assert windows.activities.tolist() == [n % 6 for n in range(count)]
    assert np.unique(parts["train"].subjects).tolist() == [1, 3, 5, 6, 30]
    assert np.unique(parts["test"].subjects).tolist() == [2, 4]


def test_the_archive_inside_is_read_too(data_files, inner: Path) -> None:
    outside, inside = read_archive(data_files.folder / NAME), read_archive(inner)
    np.testing.assert_array_equal(outside["test"].signals, inside["test"].signals)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train/y_train.txt", None, r"no item named 'UCI HAR Dataset/train/y_train.txt'"),
        ("test/y_test.txt", "7\n" * 48, r"test/y_test.txt holds numbers outside 1 to 6"),
        ("test/y_test.txt", "1\n" * 47, r"body_acc_x_test.txt has 48 rows, but there are 47 labels"),
        ("test/subject_test.txt", "1\n" * 3, r"test has 3 subjects, but 48 labels"),
        ("test/Inertial Signals/body_gyro_y_test.txt", "1 2\n" * 48, r"body_gyro_y_test.txt has 2 columns instead of"),
        ("test/Inertial Signals/body_gyro_y_test.txt", "x\n", r"body_gyro_y_test.txt: could not convert string 'x'"),
    ],
)
def test_what_is_wrong_is_named(changed, name: str, text: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"changed.zip is not the archive of UCI-HAR: .*{message}"):
        read_archive(changed(name, text))


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.zip"
    path.write_bytes(b"<html>sorry</html>")
    with pytest.raises(ValueError, match=r"page.zip is not the archive of UCI-HAR: File is not a zip file"):
        read_archive(path)


def test_a_damaged_archive_inside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "outer.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("UCI HAR Dataset.zip", io.BytesIO(b"PK").getvalue())
    with pytest.raises(ValueError, match=r"outer.zip is not the archive of UCI-HAR"):
        read_archive(path)
