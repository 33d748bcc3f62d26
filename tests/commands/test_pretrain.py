"""``lightning-accept pretrain``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_accept.cli import main
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.model_facts import ModelFacts
from lightning_accept.latency.predictor import Predictor
from lightning_accept.latency.submodels import Measurement, all_spans

LAYERS = 5


def save(path: Path, first: int, layers: int = LAYERS) -> str:
    """Three devices of random speed."""
    names = tuple(str(index) for index in range(layers))
    flops = tuple(1e6 * (index + 1) for index in range(layers))
    facts = ModelFacts("net", names, flops, (10,) * layers, (10,) * layers, ((),) * (layers + 1), 8)
    configurations = []
    for number in range(first, first + 3):
        random = np.random.default_rng(number)
        seconds = random.uniform(0.1, 1.0, layers)
        measured = [
            Measurement(a, b, float(seconds[a:b].sum()), 2 * float(seconds[a:b].sum())) for a, b in all_spans(layers)
        ]
        configurations.append(Configuration(f"device {number}", tuple(measured)))
    Dataset(facts, tuple(configurations)).save(path)
    return str(path)


def test_a_predictor_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "predictor.safetensors")
    files = [save(tmp_path / "a.json", 0), save(tmp_path / "b.json", 3)]
    assert main(["pretrain", *files, "--out", out, "--steps", "0", "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"{out}: latency predictor of net, batch 8, from 6 device configurations\n"
    predictor = Predictor.load(out)
    predictor.prepare(LAYERS, [1e6 * (index + 1) for index in range(LAYERS)])
    assert predictor.spans("new device", central=False)


@pytest.mark.parametrize("second", ["missing", "other", "same", "damaged"])
def test_data_that_does_not_do(second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path / "a.json", 0)
    path = tmp_path / "b.json"
    if second == "other":
        save(path, 3, layers=4)
    elif second == "same":
        save(path, 0)
    elif second == "damaged":
        path.write_text("{}")
    assert main(["pretrain", first, str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("lightning-accept pretrain: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["--out", "x"], ["a", "--out", "x", "--steps", "-1"], ["a"]])
def test_mistakes_exit_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["pretrain", *arguments])
    assert exit_.value.code == 2
