"""What holds for all tests: one thread, one seed, no proxies, a scratch folder, and no process left behind.

Also small data sets in the real ones' formats.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import select
import signal
import struct
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported, and for the processes that tests start.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"
for _name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[_name]
# LightningCLI warns where nobody has set a seed before, which would depend on the tests that ran before.
os.environ["PL_GLOBAL_SEED"] = "0"
# Whoever runs the tests in the background or under nohup has these ignored, and what tests start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

MARK = "LIGHTNING_ACCEPT_TESTS"
GRACE = 15.0
"""Seconds that processes started by the tests have to end once the last test is over."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes, a file's tests stay together, and so do those that measure emulated devices.

    Only to save time: pytest-xdist 3.8 does not see the groups under pytest 9.2, whose items' ids cannot be changed.
    """
    folder = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(folder)
        item.add_marker(pytest.mark.xdist_group("benchmarks" if path.parts[0] == "benchmarks" else str(path)))


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts with one thread and the same random numbers, whichever ran before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Terminal(io.StringIO):
    """Keeps what is written, and lets others wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._changed:
            count = super().write(text)
            self._changed.notify_all()
        return count

    def wait_for(self, text: str, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.getvalue().count(text) >= count, 30.0), f"{text!r} is not shown"

    @property
    def screen(self) -> list[str]:
        """The lines that a terminal would show now."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]+", self.getvalue()):
            if part == "\x1b[A":
                row -= 1
            elif part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif part == "\r":
                column = 0
            else:
                lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]


@pytest.fixture
def new_terminal() -> type[Terminal]:
    """Makes terminals that remember what was written."""
    return Terminal


@pytest.fixture(scope="session", autouse=True)
def _scratch_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs and checkpoints that a Trainer writes by default do not land in the repository."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("scratch"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fails if a process started by the tests, or by what they started, outlives them."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield
    left = _still_running(_marked(mark), time.monotonic() + GRACE)
    assert not left, f"processes outlived the tests: {left}"


def _marked(mark: str) -> dict[int, str]:
    """Process ids and command lines of all processes whose environment carries ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile, or belongs to someone else
    # Python's own helper lives as long as the interpreter that runs the tests.
    return {pid: line for pid, line in found.items() if pid != os.getpid() and "resource_tracker" not in line}


def _still_running(processes: dict[int, str], deadline: float) -> dict[int, str]:
    """Those of ``processes`` that have not ended at ``deadline``."""
    left = {}
    for pid, line in processes.items():
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
        if not ended:
            left[pid] = line
    return left


# ----- data


@dataclass(frozen=True)
class DataFiles:
    """A folder with MNIST (200 and 40 images), CIFAR-10 (200 and 40) and UCI-HAR (240 windows and 48).

    Attributes:
        folder: The folder.
        har_sha256: Digest of the archive of UCI-HAR in it.
        cifar_md5: Digests of the files of CIFAR-10 in it.
    """

    folder: Path
    har_sha256: str
    cifar_md5: dict[str, str]


@pytest.fixture(scope="session")
def written_data_files(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    folder = tmp_path_factory.mktemp("data")
    _write_mnist(folder / "MNIST" / "raw")
    cifar = _write_cifar10(folder / "cifar-10-batches-py")
    har = folder / "human+activity+recognition+using+smartphones.zip"
    _write_har(har)
    return DataFiles(folder, hashlib.sha256(har.read_bytes()).hexdigest(), cifar)


@pytest.fixture
def data_files(written_data_files: DataFiles, monkeypatch: pytest.MonkeyPatch) -> DataFiles:
    """The files, and torchvision expecting these digests of CIFAR-10's."""
    from torchvision.datasets import CIFAR10

    digests = written_data_files.cifar_md5
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, name, [[file, digests[file]] for file, _ in getattr(CIFAR10, name)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": digests["batches.meta"]})
    return written_data_files


def _write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate((("train", 200), ("t10k", 40))):
        pixels = np.random.default_rng(seed).integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = struct.pack(">4i", 0x803, count, 28, 28) + pixels.tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.tobytes())


def _write_cifar10(folder: Path) -> dict[str, str]:
    folder.mkdir()
    contents: dict[str, object] = {"batches.meta": {"label_names": [f"thing {n}" for n in range(10)]}}
    for seed, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(seed).integers(256, size=(40, 3 * 32 * 32), dtype=np.uint8)
        contents[name] = {"data": pixels, "labels": [n % 10 for n in range(40)]}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
    return {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in contents}


def _write_har(path: Path) -> None:
    """Five subjects to learn from and two to test with, who do everything in turn; numbers written as in the original.

    The first sample of a window tells its channel and its row.
    """
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, subjects, count in (("train", (1, 3, 5, 6, 30), 240), ("test", (2, 4), 48)):
            rows = np.arange(count)
            columns = {"y": 1 + rows % 6, "subject": np.array(subjects)[rows * len(subjects) // count]}
            for name, column in columns.items():
                archive.writestr(f"UCI HAR Dataset/{part}/{name}_{part}.txt", "".join(f"{n}\n" for n in column))
            for channel, sensor in enumerate(("body_acc", "body_gyro", "total_acc")):
                for axis, letter in enumerate("xyz"):
                    signal = np.random.default_rng(channel).normal(size=(count, 128))
                    signal[:, 0] = rows + (3 * channel + axis) / 10
                    name = f"{sensor}_{letter}_{part}.txt"
                    lines = ("".join(f" {value: .7e}" for value in row) for row in signal)
                    text = "\n".join(lines).replace("e-", "e-0").replace("e+", "e+0") + "\n"
                    archive.writestr(f"UCI HAR Dataset/{part}/Inertial Signals/{name}", text)
                    # What a Mac left there.
                    archive.writestr(f"__MACOSX/UCI HAR Dataset/{part}/Inertial Signals/._{name}", b"\0\1")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("UCI HAR Dataset.zip", inner.getvalue())
        archive.writestr("UCI HAR Dataset.names", "Human Activity Recognition Using Smartphones Data Set\n")
