from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import pytest
import tables
import torch
from convergence import Task
from report import Report
from torch import nn


def test_points_are_against_the_same_seeds_of_the_single_device() -> None:
    report = Report("accuracy")
    hits = {("single device", 0): 0.90, ("single device", 1): 0.92, ("ours, 4 / 4 bits", 0): 0.91}
    hits |= {("ours, 4 / 4 bits", 1): 0.90, ("ours, 4 / 4 bits", 2): 0.10}
    for (method, seed), share in hits.items():
        row = {"task": "activity", "method": method, "seed": seed, "accuracy": share}
        report.rows.setdefault("runs", []).append({**row, "epochs": 20, "bytes_per_batch": 2048.0})
    accuracy.sum_up(report)
    single, ours = report.rows["summary"]
    assert single["points_against_single"] == 0.0
    assert ours["points_against_single"] == pytest.approx(-0.5)
    assert report.figures["activity: ours, 4 / 4 bits, within 0.5 points of a single device"] in (True, False)
    assert "| activity | single device | 2, 20 | 91.00 ± 1.41 | +0.00 | 2 |" in tables.accuracy({"rows": report.rows})


def test_the_number_of_epochs_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0])
    monkeypatch.setattr(accuracy, "seconds_per_epoch", lambda task, parts: next(seconds))
    report = Report("accuracy")
    task = Task(lambda _: None, nn.Identity, (), epochs=0, rate=0.1)
    parts = (torch.zeros(8, 1), torch.zeros(2, 1), torch.zeros(8), torch.zeros(2))
    assert [accuracy.epochs_of(report, "mnist", task, parts, 5.5) for _ in range(2)] == [3, 3]


def test_learning_rates_by_staleness_are_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    parts = (torch.zeros(8, 1), torch.zeros(2, 1), torch.zeros(8), torch.zeros(2))
    monkeypatch.setitem(accuracy.TASKS, "activity", Task(lambda _: parts, nn.Identity, (), epochs=1, rate=0.1))
    monkeypatch.setattr(accuracy, "run", lambda *arguments: asked.append(arguments) or {"accuracy": 0.5})
    report = Report("accuracy")
    arguments = Namespace(tasks=["activity"], data=None, quick=False, minutes=1.0, seeds=1, bits=None, json=None)
    for scale_lr in (False, True):
        arguments.scale_lr, arguments.methods = scale_lr, ["single", "no"]
        accuracy.measure(report, arguments)
    labels = [row["method"] for row in report.rows["runs"]]
    assert labels == ["single device", "no compression", "no compression, learning rate by staleness"]
    assert [arguments[-1] for arguments in asked] == [False, False, True]


def test_activity_recognition_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 512), ("test", 250)):
        arrays[f"x_{part}"] = generator.normal(size=(count, 9, 128)).astype(np.float16)
        arrays[f"y_{part}"] = generator.integers(0, 6, count)
    np.savez(tmp_path / "har.npz", **arrays)
    script, result = str(accuracy.__file__), tmp_path / "accuracy.json"
    command = [sys.executable, script, "activity", "--quick", "--data", str(tmp_path), "--json", str(result)]
    subprocess.run([*command, "--methods", "single", "ours"], check=True, timeout=240, capture_output=True)
    first = json.loads(result.read_text())["rows"]["runs"]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    runs = json.loads(result.read_text())["rows"]["runs"]
    single, uncompressed, paper, ours = accuracy.methods((6, 4))
    assert [row["method"] for row in runs] == [single, ours, uncompressed, paper]
    assert runs[:2] == first
    sizes = {row["method"]: row["bytes_per_batch"] for row in runs}
    assert sizes[single] == 0 < sizes[paper] < sizes[ours] < sizes[uncompressed]
