"""``lightning-accept plan``, from data to table and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_accept.cli import main
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.model_facts import CutFact, ModelFacts
from lightning_accept.latency.submodels import Measurement, all_spans

LAYERS = 5


def save(path: Path, batch: int = 16, spans: Sequence[tuple[int, int]] | None = None, name: str = "net") -> str:
    """Equal layers, 1 ms forward and 2 ms backward per sample on ``fast``, four times as long on ``slow``."""
    facts = ModelFacts(
        name,
        tuple(f"{name}.{index}" for index in range(LAYERS)),
        (1e6 * batch,) * LAYERS,
        (1000,) * LAYERS,
        (200 * batch,) * LAYERS,
        tuple((CutFact((batch, 64), 4, True),) for _ in range(LAYERS + 1)),
        batch,
    )
    configurations = []
    for device, factor in (("fast", 1e-3), ("slow", 4e-3)):
        each = factor * batch
        measured = [Measurement(a, b, (b - a) * each, 2 * (b - a) * each) for a, b in spans or all_spans(LAYERS)]
        configurations.append(Configuration(device, tuple(measured)))
    Dataset(facts, tuple(configurations)).save(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = save(tmp_path / "data.json")
    plan = run(capsys, data, "--devices", "slow", "fast", "fast", "--links", "10Mbit@1ms")
    assert plan["model"] == "net"
    assert [stage["layers"] for stage in plan["plan"]["stages"]] == [
        ["net.0"],
        ["net.1"],
        ["net.2", "net.3", "net.4"],
    ]
    assert [stage["name"] for stage in plan["plan"]["stages"]] == ["slow", "fast #1", "fast #2"]
    assert plan["plan"]["bottleneck"] == "stage 0 (slow)"
    assert plan["plan"]["stages"][0]["seconds"] == pytest.approx(0.192)
    assert plan["speedup_over_one_device"] == pytest.approx(0.24 / plan["period_seconds"])
    assert plan["schedule"]["in_flight"] >= 2
    assert len(plan["schedule"]["staleness"]) == 3
    assert [one["in_flight"] for one in plan["trade"]] == sorted(one["in_flight"] for one in plan["trade"])
    assert plan["plan"]["stages"][1]["memory"] > 0


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", save(tmp_path / "data.json"), "--devices", "fast", "slow", "--links", "400kbit"]) == 0
    text = capsys.readouterr().out
    assert "net, batch 16" in text
    assert "net.0 to net.3 (4)" in text
    assert "held up most by stage 0 (fast)" in text
    assert "fast -> slow" in text
    assert "times as fast as fast alone" in text
    assert "period against staleness (* chosen):" in text


def test_slower_links_move_the_bottleneck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = save(tmp_path / "data.json")
    common = (data, "--devices", "fast", "fast", "fast", "--forward-codec", "raw", "--backward-codec", "raw")
    plan = run(capsys, *common, "--links", "unlimited", "50kbit", "unlimited")
    assert plan["plan"]["bottleneck"] == "link fast #1 -> fast #2"
    fewer = run(capsys, *common, "--links", "unlimited", "50kbit", "unlimited", "--leave-out")
    assert len(fewer["plan"]["stages"]) == 2
    assert len(fewer["plan"]["left_out"]) == 1


@pytest.mark.parametrize("latency", ["measured", "capacity"])
def test_latency_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], latency: str) -> None:
    data = save(tmp_path / "data.json")
    plan = run(capsys, data, "--devices", "slow", "fast", "fast", "--latency", latency)
    assert plan["plan"]["stages"][0]["seconds"] == pytest.approx(0.192)


def test_smaller_batches_offer_micro_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [save(tmp_path / f"{batch}.json", batch) for batch in (4, 16)]
    plan = run(capsys, *data, "--devices", "fast", "fast", "fast", "--links", "200kbit@20ms")
    assert {one["micro_batches"] for one in plan["trade"]} == {1, 4}
    assert plan["batch"] == 16


def test_depth_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = save(tmp_path / "data.json")
    plan = run(capsys, data, "--devices", "fast", "fast", "--in-flight", "3", "--memory", "1GiB", "27000B")
    assert plan["schedule"]["in_flight"] == 3
    assert len(plan["plan"]["stages"][1]["layers"]) < 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--devices", "fast", "slow"], "missing.json"),
        (["DATA", "--devices", "fast", "pi"], "no device 'pi' in the data; there are fast, slow"),
        (["DATA", "--devices", "fast", "slow", "--links", "1Mbit", "2Mbit", "3Mbit"], "1 value or 2"),
        (["DATA", "--devices", "fast", "slow", "--links", "quick"], "is not a link"),
        (["DATA", "--devices", "fast", "slow", "--latency", "flops"], "tells no times"),
        (["DATA", "--devices", "fast", "slow", "--memory", "1KiB"], "memory"),
        (["DATA", "--devices", "fast", "slow", "--memory", "much"], "not a size"),
        (["DATA", "--devices", "fast", "slow", "--forward-codec", "zip"], "zip"),
        (["FEW", "--devices", "fast", "slow"], "were not measured on 'fast'"),
        (["DATA", "OTHER", "--devices", "fast", "slow"], "different models"),
        (["DATA", "ODD", "--devices", "fast", "slow"], "batch size 5 is no whole part of 16"),
    ],
)
def test_errors_say_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    files = {
        "DATA": save(tmp_path / "data.json"),
        "FEW": save(tmp_path / "few.json", spans=[(0, 1), (1, 2)]),
        "OTHER": save(tmp_path / "other.json", 8, name="other"),
        "ODD": save(tmp_path / "odd.json", 5),
    }
    assert main(["plan", *(files.get(argument, argument) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
