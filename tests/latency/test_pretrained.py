"""Predictor files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.network import DualStream
from lightning_accept.latency.predictor import Predictor
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.training import pretrain

Make = Callable[..., Dataset]


@pytest.mark.parametrize("network", [False, True])
def test_round_trip(make_dataset: Make, tmp_path: Path, network: bool) -> None:
    dataset = make_dataset()
    trained = pretrain(dataset, steps=0)
    if network:
        own = DualStream(len(trained.layers), 2 * len(trained.spans))
        torch.nn.init.normal_(own.last.weight, 0.0, 0.01)
        trained = replace(trained, network=own.requires_grad_(False), network_output=(0.5, 0.7))
    trained.save(tmp_path / "new" / "model.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    loaded = Pretrained.load(tmp_path / "new" / "model.safetensors")
    for name in ("layers", "flops", "batch", "spans", "configurations", "network_output", "calibration"):
        assert getattr(loaded, name) == getattr(trained, name)
    known = dataset.configurations[0].by_span()
    tables = []
    for one in (trained, loaded):
        model = Predictor(one)
        model.learn("pi", [known[span] for span in model.spans("pi", False)])
        tables.append(model.times("pi").table())
    assert (tables[0] == tables[1]).all()


def test_other_models_are_refused(make_dataset: Make) -> None:
    trained = pretrain(make_dataset(2), steps=0)
    flops = list(trained.flops)
    trained.check(flops, [])
    trained.check([2 * one for one in flops], trained.layers)
    with pytest.raises(ValueError, match="is for 7 layers, the model has 6"):
        trained.check(flops[1:], [])
    with pytest.raises(ValueError, match="layer 0 is 'layer0' for the predictor but 'other'"):
        trained.check(flops, ["other", *trained.layers[1:]])
    with pytest.raises(ValueError, match="of the model's FLOPs"):
        trained.check([10 * flops[0], *flops[1:]], [])


def test_damaged_files_are_refused(make_dataset: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Pretrained.load(tmp_path / "none")
    path = tmp_path / "file"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="no latency predictor"):
        Pretrained.load(path)
    save_file({"reference": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="no latency predictor"):
        Pretrained.load(path)
    trained = pretrain(make_dataset(2), steps=0)
    replace(trained, reference=trained.reference[:-1]).save(path)
    with pytest.raises(ValueError, match="reference has shape"):
        Pretrained.load(path)
    replace(trained, spans=((0, 99),)).save(path)
    with pytest.raises(ValueError, match="contradicts itself"):
        Pretrained.load(path)
    replace(trained, network_input=float("nan")).save(path)
    with pytest.raises(ValueError, match="no proper numbers"):
        Pretrained.load(path)
