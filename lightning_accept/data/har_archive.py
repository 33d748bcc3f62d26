"""The archive of UCI-HAR: a zip file inside a zip file, with text files."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Number = TypeVar("_Number", np.int64, np.float32)

INNER = "UCI HAR Dataset.zip"
FOLDER = "UCI HAR Dataset"
SIGNALS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""The channels: acceleration without gravity (in g), turning (rad/s), acceleration with gravity (in g)."""
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
LENGTH = 128
"""Samples per window, at 50 Hz."""


@dataclass(frozen=True)
class Windows:
    """One of the two parts of the data set.

    Attributes:
        signals: float32 ``[n, 9, 128]``, channels in the order of :data:`SIGNALS`.
        activities: int64 ``[n]``, indices into :data:`ACTIVITIES`.
        subjects: int64 ``[n]``, the persons' numbers, from 1.
    """

    signals: NDArray[np.float32]
    activities: NDArray[np.int64]
    subjects: NDArray[np.int64]


def read_archive(path: Path) -> dict[str, Windows]:
    """Parts ``train`` and ``test`` from the archive as UCI offers it, or from the one inside it.

    Raises:
        ValueError: If it is not such an archive; the message names the file inside that is missing or wrong.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if INNER not in archive.namelist():
                return _read_both(archive)
            with zipfile.ZipFile(io.BytesIO(archive.read(INNER))) as inner:
                return _read_both(inner)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        # KeyError puts quotes around its text.
        text = error.args[0] if error.args else type(error).__name__
        raise ValueError(f"{path} is not the archive of UCI-HAR: {text}") from error


def _read_both(archive: zipfile.ZipFile) -> dict[str, Windows]:
    return {part: _read_part(archive, part) for part in ("train", "test")}


def _read_part(archive: zipfile.ZipFile, part: str) -> Windows:
    activities = _table(archive, f"{part}/y_{part}.txt", 1, np.int64)[:, 0] - 1
    subjects = _table(archive, f"{part}/subject_{part}.txt", 1, np.int64)[:, 0]
    if len(activities) and not 0 <= activities.min() <= activities.max() < len(ACTIVITIES):
        raise ValueError(f"{part}/y_{part}.txt holds numbers outside 1 to {len(ACTIVITIES)}")
    signals = np.empty((len(activities), len(SIGNALS), LENGTH), np.float32)
    for channel, signal in enumerate(SIGNALS):
        name = f"{part}/Inertial Signals/{signal}_{part}.txt"
        table = _table(archive, name, LENGTH, np.float32)
        if len(table) != len(activities):
            raise ValueError(f"{name} has {len(table)} rows, but there are {len(activities)} labels")
        signals[:, channel] = table
    if len(subjects) != len(activities):
        raise ValueError(f"{part} has {len(subjects)} subjects, but {len(activities)} labels")
    return Windows(signals, activities, subjects)


def _table(archive: zipfile.ZipFile, name: str, columns: int, dtype: type[_Number]) -> NDArray[_Number]:
    try:
        with archive.open(f"{FOLDER}/{name}") as file:
            table: NDArray[_Number] = np.loadtxt(file, dtype=dtype, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if table.shape[1] != columns:
        raise ValueError(f"{name} has {table.shape[1]} columns instead of {columns}")
    return table
