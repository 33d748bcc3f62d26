"""UCI-HAR: what people do, from the sensors of the smartphone that they wear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightning_accept.data.arrays import ArrayDataModule, Parts
from lightning_accept.data.download import check_digest, download
from lightning_accept.data.errors import DataNotFoundError
from lightning_accept.data.har_archive import INNER, Windows, read_archive
from lightning_accept.data.stand_in import patterns

URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
FILE = URL.rpartition("/")[2]
SHA256 = "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"
"""Of the archive at :data:`URL`. UCI publishes none; this is what those who downloaded it have written down."""
INNER_SHA256 = "2045e435c955214b38145fb5fa00776c72814f01b203fec405152dac7d5bfeb0"
"""Of the archive inside, which UCI offered by itself in earlier years."""


class UCIHARDataModule(ArrayDataModule):
    """Windows of 2.56 s from 30 persons (Anguita et al., ESANN 2013): float ``[batch, 9, 128]``, labels ``[batch]``.

    7,352 windows of 21 persons to learn from, 2,947 of nine others to test with; six activities, labels from 0. The
    archive (61 MB) is downloaded from UCI and its digest checked. Every channel is normalised by the mean and standard
    deviation over the windows learnt from.

    Args:
        data_dir: Folder with the archive, either as UCI offers it or the one inside it, ``UCI HAR Dataset.zip``.
        batch_size: Windows per batch; twice as many without gradients.
        val_subjects: Number of persons of the training part that are held out for validation, the last ones.
        num_workers: Processes that load data.
        url: Where to download the archive from.
        sha256: Digest that the archive must have; by default that of UCI's, or of the one inside it.
        stand_in: Use 1,440 generated windows.

    Raises:
        ValueError: If ``batch_size`` is below 1. In ``prepare_data``: if the archive has another digest. In ``setup``:
            if it is none, or has too few persons.
    """

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 64,
        val_subjects: int = 3,
        num_workers: int = 0,
        url: str = URL,
        sha256: str | None = None,
        stand_in: bool = False,
    ) -> None:
        super().__init__(data_dir, batch_size, num_workers, stand_in)
        self.val_subjects = val_subjects
        self.url = url
        self.sha256 = sha256

    @override
    def fetch(self) -> None:
        path = self._archive()
        if path is not None:
            check_digest(path, *([self.sha256] if self.sha256 else [SHA256, INNER_SHA256]))
            return
        path = Path(self.data_dir, FILE)
        try:
            download(self.url, path, self.sha256 or SHA256)
        except OSError as error:
            raise DataNotFoundError(
                f"UCI-HAR is not in {self.data_dir} and could not be downloaded ({error}). Download {self.url}"
                f" elsewhere and put it, as it is, at {path}; or use generated windows, with"
                " data.init_args.stand_in=true"
            ) from error

    @override
    def read(self) -> Parts:
        path = self._archive()
        if path is None:
            raise DataNotFoundError(
                f"there is neither {FILE} nor {INNER} in {self.data_dir}; call prepare_data() first"
            )
        parts = read_archive(path)
        train, val = self._hold_out(parts["train"])
        return _normalised({"train": train, "val": val, "test": parts["test"]})

    @override
    def read_stand_in(self) -> Parts:
        counts = {"train": 1000, "val": 200, "test": 240}
        return {
            name: TensorDataset(*patterns((9, 128), 6, count, seed))
            for seed, (name, count) in enumerate(counts.items())
        }

    def _archive(self) -> Path | None:
        """The archive, if it is there."""
        candidates = (Path(self.data_dir, name) for name in (FILE, INNER))
        return next((path for path in candidates if path.is_file()), None)

    def _hold_out(self, windows: Windows) -> tuple[Windows, Windows]:
        subjects = np.unique(windows.subjects)
        if not 1 <= self.val_subjects < len(subjects):
            raise ValueError(
                f"val_subjects={self.val_subjects}: give a number from 1 to {len(subjects) - 1}, so that some of the"
                f" {len(subjects)} persons are left to learn from"
            )
        held_out = np.isin(windows.subjects, subjects[-self.val_subjects :])
        return _chosen(windows, ~held_out), _chosen(windows, held_out)


def _chosen(windows: Windows, mask: NDArray[np.bool_]) -> Windows:
    return Windows(windows.signals[mask], windows.activities[mask], windows.subjects[mask])


def _normalised(parts: dict[str, Windows]) -> Parts:
    signals = parts["train"].signals
    mean, std = signals.mean((0, 2), keepdims=True), signals.std((0, 2), keepdims=True)
    return {
        name: TensorDataset(
            torch.from_numpy((windows.signals - mean) / np.maximum(std, 1e-6)), torch.from_numpy(windows.activities)
        )
        for name, windows in parts.items()
    }
