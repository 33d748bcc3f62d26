"""``lightning-accept profile``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_accept.cli import main
from lightning_accept.commands import profile as module
from lightning_accept.commands.profile import ProfileOptions, run_profile_command
from lightning_accept.latency import collect as collecting
from lightning_accept.latency.collect import CollectError
from lightning_accept.latency.conditions import Condition
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.submodels import Measurement, all_spans
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.remote.local import LocalWorkers

SOURCE = """
import torch
from torch import nn

def make(depth=3):
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
    net.example_input_array = torch.zeros(5, 4)
    return net
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("LIGHTNING_ACCEPT_TOKEN", raising=False)
    yield
    sys.modules.pop("users_net", None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Conditions that were to be measured; none is, and one fails."""
    names: list[str] = []

    def measure(condition: Condition, request: str, seconds: float, on_progress: Callable[[float], None]) -> Any:
        names.append(condition.name)
        if condition.name == "scalar kernels":
            raise CollectError("it broke")
        return [Measurement(*span, 1.0, 2.0) for span in all_spans(3)], []

    monkeypatch.setattr(collecting, "_measure", measure)
    return names


def options(**changes: Any) -> ProfileOptions:
    settings: dict[str, Any] = {
        "module": "users_net.make",
        "args": None,
        "submodule": None,
        "input": [],
        "workers": [],
        "token_file": None,
        "cafile": None,
        "threads": [1],
        "conditions": ["none"],
        "seconds": 0.01,
        "repeat_seconds": 0.01,
        "timeout": 60.0,
        "name": None,
        "machine": None,
        "out": "data.json",
    }
    return ProfileOptions(**{**settings, **changes})


def test_options_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProfileOptions] = []
    monkeypatch.setattr(module, "run_profile_command", lambda chosen: seen.append(chosen) or 0)
    line = (
        "profile users_net.make --args [2] --input 8,4 --workers http://a:1 http://b:2 --token-file t --threads 1 2"
        " --conditions plain avx2 --seconds 9 --name net --machine pi --out data.json"
    )
    assert main(line.split()) == 0
    expected = options(
        args="[2]",
        input=["8,4"],
        workers=["http://a:1", "http://b:2"],
        token_file="t",
        threads=[1, 2],
        conditions=["plain", "avx2"],
        seconds=9.0,
        repeat_seconds=0.5,
        timeout=1800.0,
        name="net",
        machine="pi",
    )
    assert seen == [expected]


def test_local_conditions(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile_command(options(conditions=["plain", "fresh memory"], machine="pi")) == 0
    data = Dataset.load("data.json")
    assert [one.name for one in data.configurations] == ["pi: plain", "pi: fresh memory"]
    assert data.model.name == "Sequential"
    assert data.model.batch == 5
    out, err = capsys.readouterr()
    assert out == "data.json: Sequential, batch 5, 3 layers, 2 device configurations\n"
    assert err == ""


def test_a_failure_does_not_stop_the_others(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile_command(options(conditions=["scalar kernels", "plain"], name="net")) == 1
    assert [one.name for one in Dataset.load("data.json").configurations] == ["plain"]
    assert capsys.readouterr().err == "lightning-accept profile: it broke\n"


def test_what_is_not_available_is_left_out(
    measured: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Condition, "unavailable", lambda self: "no luck" if self.name == "plain" else None)
    assert run_profile_command(options(conditions=["plain", "fresh memory"])) == 0
    assert measured == ["fresh memory"]
    assert capsys.readouterr().err == "left out 'plain': no luck\n"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"conditions": ["plain"], "module": "users_net.nothing"}, "cannot find 'users_net.nothing'"),
        ({}, "there is nothing to measure on: --conditions none and no --workers"),
        ({"conditions": ["turbo"]}, "there is no condition 'turbo'"),
        ({"conditions": ["plain"], "input": ["a"]}, "'a' is no shape"),
        ({"conditions": ["plain"], "input": ["5,3"]}, "cannot be traced|mat1 and mat2|users_net|export"),
        ({"workers": ["http://a:1"]}, "give the workers' token with --token-file"),
        ({"workers": ["http://a:1"], "token_file": "missing"}, "cannot read the token file"),
        ({"workers": ["nonsense"], "token_file": "token"}, "nonsense"),
    ],
)
def test_mistakes_exit_with_code_2(
    changes: dict[str, Any], problem: str, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("token").write_text("secret")
    assert run_profile_command(options(**changes)) == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning-accept profile: ")
    assert re.search(problem, err)
    assert not Path("data.json").exists()


def test_a_file_of_another_model(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile_command(options(conditions=["plain"], args="[4]")) == 0
    assert run_profile_command(options(conditions=["fresh memory"])) == 2
    assert "different models" in capsys.readouterr().err


class Handle:
    def __init__(self, url: str, token: str, cafile: str | None) -> None:
        self.name = url
        assert (token, cafile) == ("secret", "ca.pem")


def test_workers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def profile_worker(worker: Any, request: Any, holder: str, timeout: float, on_progress: Any) -> Configuration:
        asked.append(worker.name)
        if worker.name == "http://gone:1":
            raise PipelineError("worker http://gone:1 is not there")
        return Configuration(worker.name, tuple(Measurement(*span, 1.0, 1.0) for span in request.spans))

    monkeypatch.setattr(module, "profile_worker", profile_worker)
    monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", "secret")
    chosen = options(workers=["http://gone:1", "http://a:1", "http://a:1"], cafile="ca.pem")
    assert run_profile_command(chosen, Handle) == 1  # type: ignore[arg-type]
    assert [one.name for one in Dataset.load("data.json").configurations] == ["http://a:1"]
    assert capsys.readouterr().err == "lightning-accept profile: worker http://gone:1 is not there\n"
    assert run_profile_command(chosen, Handle) == 1  # type: ignore[arg-type]
    assert asked == ["http://gone:1", "http://a:1", "http://gone:1"]


def test_on_a_real_worker() -> None:
    with LocalWorkers(1, threads=1) as workers:
        Path("token").write_text(workers.token)
        line = ["profile", "users_net.make", "--args", "[2]", "--workers", *workers.urls, "--token-file", "token"]
        assert main([*line, "--conditions", "none", "--repeat-seconds", "0.01", "--out", "data.json"]) == 0
        (configuration,) = Dataset.load("data.json").configurations
    assert configuration.name.startswith("http://127.0.0.1:")
    assert [one.span for one in configuration.measured] == all_spans(2)
    assert all(one.possible for one in configuration.measured)
    assert configuration.description["threads"] == 1
