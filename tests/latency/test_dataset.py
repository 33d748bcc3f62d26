"""Data sets as files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.submodels import Measurement

Make = Callable[..., Dataset]


def test_round_trip(make_dataset: Make, tmp_path: Path) -> None:
    dataset = make_dataset(2, 3)
    weak = Configuration("weak", (Measurement(0, 1, 1.0, 2.0), Measurement(0, 3, math.inf, math.inf)))
    dataset = Dataset(dataset.model, (*dataset.configurations, weak))
    dataset.save(tmp_path / "new" / "data.json")
    assert Dataset.load(tmp_path / "new" / "data.json") == dataset
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.json"]
    json.loads((tmp_path / "new" / "data.json").read_text(), parse_constant=pytest.fail)


def test_merge_and_leave_out(make_dataset: Make) -> None:
    dataset = make_dataset(3, 3)
    one, rest = dataset.configurations[0], dataset.without("device 0")
    assert [configuration.name for configuration in rest.configurations] == ["device 1", "device 2"]
    assert Dataset.merge([Dataset(dataset.model, (one,)), rest]) == dataset
    with pytest.raises(ValueError, match="'device 1'"):
        Dataset.merge([dataset, rest])
    with pytest.raises(ValueError, match="batch of"):
        Dataset.merge([Dataset(replace(dataset.model, batch=4), (one,)), rest])
    with pytest.raises(ValueError, match="no data sets"):
        Dataset.merge([])


def test_measurements_must_fit_the_model(make_dataset: Make) -> None:
    model = make_dataset(1, 3).model
    for wrong in (Measurement(0, 4, 1.0, 1.0), Measurement(0, 1, -1.0, 1.0), Measurement(0, 1, math.nan, 1.0)):
        with pytest.raises(ValueError, match="'odd'"):
            Dataset(model, (Configuration("odd", (wrong,)),))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "lightning-accept latency data", "version": 99}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no latency data set"):
        Dataset.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Dataset.load(tmp_path / "none.json")
