"""``lightning-accept fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_accept import AccEPTStrategy, MultiBit, StochasticUniform
from lightning_accept.cli import main
from lightning_accept.remote.local import LocalWorkers

CONFIG = """
seed_everything: 3
trainer:
  max_epochs: 1
  limit_train_batches: 3
  limit_val_batches: 2
  limit_test_batches: 2
  limit_predict_batches: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: out
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: out}
  strategy:
    class_path: lightning_accept.AccEPTStrategy
    init_args:
      workers: WORKERS
      latency: flops
      partition: [conv2]
      forward_codec:
        class_path: lightning_accept.MultiBit
        init_args: {bits: 2, levels: free}
      backward_codec: fp16
model:
  class_path: ActivityClassifier
data:
  class_path: UCIHARDataModule
  init_args: {stand_in: true, batch_size: 8}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own, and leaves the search path as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorkers]:
    """One worker."""
    with LocalWorkers(1, threads=1) as worker:
        yield worker


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``--print_config`` prints."""
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--print_config"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_four_commands_with_one_config(
    worker: LocalWorkers, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", worker.token)
    (folder / "config.yaml").write_text(CONFIG.replace("WORKERS", str(worker.urls)))
    assert main(["fit", "--config", "config.yaml"]) == 0
    (checkpoint,) = folder.glob("out/**/*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert "net.conv1.0.weight" in state and "net.dense2.bias" in state
    (saved,) = folder.glob("out/**/config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["init_args"]["partition"] == ["conv2"]
    for command in ("validate", "test", "predict"):
        assert main([command, "--config", "config.yaml", "--ckpt_path", str(checkpoint)]) == 0
    assert "test_accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    "strategy",
    [
        ["accept"],
        [
            "AccEPTStrategy",
            "--trainer.strategy.workers=3",
            "--trainer.strategy.partition=[1, features.3]",
            "--trainer.strategy.in_flight=2",
            "--trainer.strategy.forward_codec=MultiBit",
            "--trainer.strategy.forward_codec.bits=3",
        ],
        [
            "lightning_accept.AccEPTStrategy",
            "--trainer.strategy.workers=[http://a:1, https://b:2]",
            "--trainer.strategy.backward_codec=bf16",
            "--trainer.strategy.latency=capacity",
        ],
    ],
)
def test_a_printed_config_can_be_read_again(
    strategy: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model=ActivityClassifier", "--data=UCIHARDataModule", f"--trainer.strategy={strategy[0]}"]
    printed = printed_config(capsys, "fit", *arguments, *strategy[1:])
    (folder / "printed.yaml").write_text(printed)
    assert printed_config(capsys, "fit", "--config", "printed.yaml") == printed
    config = yaml.safe_load(printed)["trainer"]["strategy"]
    assert config == "accept" if strategy == ["accept"] else config["class_path"] == "lightning_accept.AccEPTStrategy"


def test_scripts_of_ones_own_take_the_strategy_too() -> None:
    def strategy(*arguments: str) -> AccEPTStrategy:
        cli = LightningCLI(BoringModel, BoringDataModule, run=False, args=list(arguments))
        assert isinstance(cli.trainer.strategy, AccEPTStrategy)
        return cli.trainer.strategy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py"])
        strategy("--trainer.strategy=accept")
        made = strategy(
            "--trainer.strategy=lightning_accept.AccEPTStrategy",
            "--trainer.strategy.forward_codec=lightning_accept.MultiBit",
            "--trainer.strategy.forward_codec.bits=3",
            "--trainer.strategy.backward_codec={class_path: StochasticUniform, init_args: {bits: 4, block: 128}}",
            "--trainer.strategy.workers=[http://a:1]",
        )
    forward, backward = made._codecs["forward_codec"], made._codecs["backward_codec"]
    assert isinstance(forward, MultiBit) and forward.bits == 3
    assert isinstance(backward, StochasticUniform) and (backward.bits, backward.config()["block"]) == (4, 128)
    assert made._worker_places == ["http://a:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: fit.model"),
        (["--model=NoSuchModel"], "NoSuchModel"),
        (["--model=ActivityClassifier", "--trainer.strategy=AccEPTStrategy", "--trainer.strategy.x=1"], "'x'"),
        (["--model=ActivityClassifier", "--config=missing.yaml"], "missing.yaml"),
        (
            ["--model=ActivityClassifier", "--trainer.strategy=AccEPTStrategy", "--trainer.strategy.in_flight=0"],
            "in_flight=0: give 'auto' or a number from 1\n",
        ),
        (["--model=ActivityClassifier", "--model.length=100"], "length=100: give a multiple of 8"),
        (
            ["--model=ActivityClassifier", "--trainer.strategy=AccEPTStrategy", "--trainer.strategy.workers=pi-1:7070"],
            "workers",
        ),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *arguments])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_missing_data_is_a_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    def refuse(*_: object, **__: object) -> None:
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "get", refuse)
    options = ["--model=ActivityClassifier", "--data=UCIHARDataModule", "--trainer.fast_dev_run=true"]
    assert main(["fit", *options]) == 1
    assert "lightning-accept fit: UCI-HAR is not in data and could not be downloaded" in capsys.readouterr().err


def test_a_worker_that_is_not_there_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "fit --model=ActivityClassifier --data=UCIHARDataModule --data.stand_in=true --trainer.fast_dev_run=true"
        " --trainer.strategy=AccEPTStrategy --trainer.strategy.workers=[http://127.0.0.1:9]"
        " --trainer.strategy.timeout=2 --trainer.strategy.token=x"
    )
    assert main(arguments.split()) == 1
    assert "lightning-accept fit: " in (error := capsys.readouterr().err) and "http://127.0.0.1:9" in error


def test_classes_of_the_folder_one_works_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "somebodys_model.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Model(BoringModel):\n"
        "    def __init__(self, size: int = 1):\n"
        "        super().__init__()\n"
        "        raise ValueError('out of my own code')\n"
    )
    with pytest.raises(ValueError, match="out of my own code"):
        main(["fit", "--model=somebodys_model.Model", "--trainer.fast_dev_run=true"])
    assert "somebodys_model.Model" in printed_config(capsys, "fit", "--model=somebodys_model.Model")


def test_help_lists_the_commands_and_needs_neither_lightning_nor_torch() -> None:
    code = (
        "import sys\nfrom lightning_accept.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print({'lightning', 'pytorch_lightning', 'torch'} & set(sys.modules))"
    )
    for arguments in (["--help"], ["worker", "--help"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.splitlines()[-1] == "set()"
        assert arguments != ["--help"] or all(word in done.stdout for word in ("fit", "validate", "test", "predict"))
