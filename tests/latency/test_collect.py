"""Collecting a data set in processes of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.graph import Chain, Trace, trace
from lightning_accept.latency import collect as module
from lightning_accept.latency.collect import CollectError, collect, read_request, write_request
from lightning_accept.latency.conditions import Condition
from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.submodels import Measurement, all_spans


@pytest.fixture(scope="module")
def traced(convolutions: nn.Module, images: Tensor) -> Trace:
    return trace(convolutions, (images,), {})


def test_in_a_process_of_its_own(traced: Trace, tmp_path: Path) -> None:
    shares: list[float] = []
    state = torch.get_rng_state()
    file = tmp_path / "data.json"
    data = collect(
        traced,
        "net",
        [Condition("narrow", channels_last=True, native_isa="default")],
        file,
        seconds=0.01,
        machine="here",
        on_progress=lambda condition, share: shares.append(share),
    )
    assert Dataset.load(file) == data
    (configuration,) = data.configurations
    assert configuration.name == "here: narrow"
    assert [one.span for one in configuration.measured] == all_spans(4)
    assert all(one.possible for one in configuration.measured)
    assert (configuration.description["threads"], configuration.description["channels_last"]) == (1, True)
    assert configuration.description["native_isa"] == "default"
    assert "onednn" not in configuration.description
    assert data.model.layers == ("0", "1", "2", "3")
    assert data.model.batch == 4
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_in_the_file_is_not_measured_again(
    traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(condition: Condition, *rest: object) -> tuple[list[Measurement], list[Measurement]]:
        asked.append(condition.name)
        if condition.name == "c" and asked.count("c") == 1:
            raise CollectError("no luck")
        return [Measurement(0, 1, 1.0, 2.0)], []

    monkeypatch.setattr(module, "_measure", measure)
    conditions = [Condition(name) for name in "abcd"]
    with pytest.raises(CollectError):
        collect(traced, "net", conditions, tmp_path / "data.json")
    data = collect(traced, "net", conditions, tmp_path / "data.json")
    assert asked == ["a", "b", "c", "c", "d"]
    assert [one.name for one in data.configurations] == ["a", "b", "c", "d"]


def test_the_dtypes_of_the_conditions_autocast(traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[ProfileRequest] = []

    def measure(condition: Condition, request: str, *rest: object) -> tuple[list[Measurement], list[Measurement]]:
        requests.append(read_request(request))
        return [], []

    monkeypatch.setattr(module, "_measure", measure)
    collect(traced, "net", [Condition("a"), Condition("b", autocast="bfloat16")], tmp_path / "data.json")
    assert [request.cuts[-1][0].dtype for request in requests] == [torch.float32, torch.bfloat16]


def test_a_file_of_another_model_is_refused(traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measure", lambda *rest: ([], []))
    small = trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(2, 2),), {})
    collect(small, "other", [Condition("a")], tmp_path / "data.json")
    with pytest.raises(ValueError, match="different models"):
        collect(traced, "net", [Condition("b")], tmp_path / "data.json")


def test_a_process_that_fails_shows_what_it_printed(
    traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_request", lambda request, path: Path(path).write_bytes(b"nonsense"))
    with pytest.raises(CollectError, match=r"measuring under 'a' ended with exit code 1; it printed:\n(.|\n)*Error"):
        collect(traced, "net", [Condition("a")], tmp_path / "data.json")
    assert not (tmp_path / "data.json").exists()


def test_requests_as_files(traced: Trace, tmp_path: Path) -> None:
    request = ProfileRequest.of(Chain.from_trace(traced), traced, [(0, 2)])
    path = str(tmp_path / "request.safetensors")
    write_request(request, path)
    assert read_request(path) == request
    assert all(torch.equal(tensor, request.tensors[name]) for name, tensor in read_request(path).tensors.items())


def test_a_collection_that_is_terminated_leaves_no_folder_behind(
    traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SIGTERM once ended the process at once, and the folder with the request stayed.
    files: list[Path] = []

    def end(condition: Condition, request: str, *_: object) -> None:
        files.append(Path(request))
        assert files[0].exists()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(module, "_measure", end)
    with pytest.raises(SystemExit):
        collect(traced, "net", [Condition("plain")], tmp_path / "data.json", seconds=1.0)
    assert not files[0].parent.exists()
