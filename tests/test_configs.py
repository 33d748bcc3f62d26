"""Every file in ``configs/`` runs, on small data sets in the real ones' formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_accept.cli import main
from lightning_accept.remote.local import LocalWorkers

FOLDER = Path(__file__).resolve().parents[1] / "configs"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    """Three workers, for all files with URLs."""
    with LocalWorkers(3, threads=1) as workers:
        yield workers


@pytest.fixture(autouse=True)
def _search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_each_task_has_a_file_with_workers_here_and_one_with_urls() -> None:
    tasks = ("cifar10_mobilenetv2", "mnist_mobilenetv2", "uci_har_cnn")
    assert sorted([*tasks, *(f"{task}_urls" for task in tasks)]) == CONFIGS


@pytest.fixture
def command(data_files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Makes the command that runs one batch with a file: on small data, and with URLs of workers of our own."""
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> list[str]:
        arguments = [
            *("fit", "--config", str(FOLDER / f"{name}.yaml"), "--trainer.fast_dev_run=true"),
            *("--data.init_args.data_dir", str(data_files.folder), "--data.init_args.batch_size=8"),
        ]
        if name.startswith("uci_har"):
            arguments.append(f"--data.init_args.sha256={data_files.har_sha256}")
        if name.endswith("_urls"):
            workers = request.getfixturevalue("workers")
            monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", workers.token)
            arguments.append(f"--trainer.strategy.init_args.workers={workers.urls}")
        return arguments

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_it_runs(name: str, command) -> None:
    # For the sake of time: MobileNetV2 is not measured, and has one embedded worker. UCI-HAR's files run as they are.
    quick = {"_mobilenetv2_urls": "latency=flops", "_mobilenetv2": "workers=1"}
    options = [f"--trainer.strategy.init_args.{option}" for end, option in quick.items() if name.endswith(end)]
    assert main([*command(name), *options]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if "mobilenetv2" in name])
def test_it_runs_as_it_is(name: str, command) -> None:
    assert main(command(name)) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_it_can_be_printed_and_read_again(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for path in (FOLDER / f"{name}.yaml", tmp_path / "printed.yaml"):
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(path), "--print_config"])
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    assert printed[0] == printed[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_its_comments_name_itself_and_its_logs(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert f"lightning-accept fit --config configs/{name}.yaml" in text
    assert yaml.safe_load(text)["trainer"]["logger"]["init_args"]["name"] == name
    assert "logs/" not in text or f"logs/{name}/" in text
