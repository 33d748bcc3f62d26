"""The command line."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accept.cli import main, parse_size
from lightning_accept.version import __version__


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command hands to the daemon."""
    from lightning_accept.remote import worker

    seen: dict[str, Any] = {}

    def run_worker(options: Any) -> int:
        seen.update(vars(options))
        return 0

    monkeypatch.setattr(worker, "run_worker", run_worker)
    return seen


def test_defaults(options: dict[str, Any]) -> None:
    from lightning_accept.remote.worker import WorkerOptions

    assert main(["worker"]) == 0
    assert options == {**vars(WorkerOptions()), "allow_optimizer": []}
    assert (options["host"], options["port"], options["max_body"]) == ("0.0.0.0", 7070, 2**31)


def test_every_option(options: dict[str, Any]) -> None:
    line = (
        "worker --host 127.0.0.1 --port 0 --token-file t --threads 3 --device cpu --max-body 1.5MiB --lease 5"
        " --certfile c --keyfile k --cafile ca --allow-optimizer a.B --allow-optimizer c.D"
    )
    assert main(line.split()) == 0
    assert options == {
        "host": "127.0.0.1",
        "port": 0,
        "token_file": "t",
        "threads": 3,
        "device": "cpu",
        "max_body": 3 * 2**19,
        "lease": 5.0,
        "certfile": "c",
        "keyfile": "k",
        "cafile": "ca",
        "allow_optimizer": ["a.B", "c.D"],
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("2GiB", 2**31), ("2 gib", 2**31), ("500MB", 500_000_000), ("1.5K", 1536), (7, 7), ("7B", 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1XB", "1 2", "0x10", "inf", "GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like 2GiB"):
        parse_size(text)


def test_a_size_that_is_none_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--max-body", "3x"]) == 2
    assert capsys.readouterr().err == (
        "lightning-accept worker: --max-body: '3x' is not a size; write it like 2GiB, 500MB or 65536\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-command"], ["worker", "--port", "70000"], ["worker", "--threads", "0"], ["worker", "--lease", "0"]],
)
def test_mistakes_exit_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: lightning-accept" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert __version__ in capsys.readouterr().out
