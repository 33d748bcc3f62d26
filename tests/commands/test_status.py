"""``lightning-accept status``, against real workers and without them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from lightning_accept.cli import main
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.local import LocalWorkers


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    found = LocalWorkers(2, threads=1)
    found.start()
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(autouse=True)
def _token(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "workers" in request.fixturenames:
        monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", request.getfixturevalue("workers").token)


def test_free_and_claimed_workers(workers: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    worker = HttpWorker(workers.urls[1], workers.token)
    worker.claim("run-1", "somebody@laptop", "link-token-that-is-long-enough-0123456789")
    try:
        assert main(["status", *workers.urls]) == 0
    finally:
        worker.release()
        worker.close()
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["worker", "version", "device", "threads"]
    assert workers.urls[0] in first
    assert "free" in first
    assert "somebody@laptop since" in second


def test_json(workers: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", workers.urls[0], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)[workers.urls[0]]
    assert answer["holder"] is None
    assert answer["facts"]["threads"] == 1


def test_a_worker_that_does_not_answer_is_named(workers: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert main(["status", url, workers.urls[0], "--timeout", "0.2"]) == 1
    out, err = capsys.readouterr()
    assert "no answer" in out.splitlines()[1]
    assert workers.urls[0] in out
    assert f"worker {url} could not be reached for the status" in err


def test_a_wrong_token_is_told(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", "wrong-token-wrong-token-wrong-token")
    assert main(["status", workers.urls[0]]) == 1
    assert "check token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["pi-1"], "is not the URL of a worker"), (["http://pi-1:7070", "--token-file", "missing"], "missing")],
)
def test_wrong_options(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", "some-token-some-token-some-token-0")
    assert main(["status", *arguments]) == 2
    assert message in capsys.readouterr().err
