"""The daemon as a process: what it prints, how it starts and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from lightning_accept.cli import main
from lightning_accept.pipeline.messages import Deployment, PipelineError
from lightning_accept.remote.client import HttpWorker

SAME_THREADS = ("--threads", str(torch.get_num_threads()))

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_accept.cli", "worker", "--device", "cpu", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in variables.items() if value},
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], start: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    assert process.stderr is not None
    raise AssertionError(f"no line {start!r} in {lines}; {process.stderr.read()}")


def test_a_worker_with_a_made_token_serves_and_stops_gracefully(start: Start) -> None:
    process = start("--host", "127.0.0.1", "--port", "0", "--threads", "1", LIGHTNING_ACCEPT_TOKEN="")
    lines = lines_until(process, "token")
    assert "worker, device cpu, 1 threads" in lines[0]
    url = lines[1].removeprefix("give this address to the central node: ")
    assert url.startswith("http://127.0.0.1:")
    token = lines[-1].rsplit(" ", 1)[1]
    handle = HttpWorker(url, token, timeout=30.0)
    assert handle.claim("run-1", "me", "link")["threads"] == 1
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert output == ""
    assert token not in errors
    assert "run run-1 released: the worker was stopped" in errors
    handle.close()
    handle.release()


def test_all_addresses_are_listed_and_the_token_file_is_kept_secret(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("a-token-of-mine\n")
    path.chmod(0o644)
    process = start("--port", "0", "--token-file", str(path))
    lines = lines_until(process, "also listening on")
    port = lines[1].rsplit(":", 1)[1]
    assert f"http://127.0.0.1:{port}" in " ".join(lines[1:])
    reply = requests.get(
        f"http://127.0.0.1:{port}/status", headers={"Authorization": "Bearer a-token-of-mine"}, timeout=30
    )
    assert reply.status_code == 200
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "a-token-of-mine" not in output + errors + "".join(lines)
    assert f"every user of this machine can read the token file; chmod 600 {path}" in errors


def test_a_stop_answers_what_waits(start: Start) -> None:
    process = start("--host", "127.0.0.1", "--port", "0", LIGHTNING_ACCEPT_TOKEN="of-the-environment")
    url = lines_until(process, "give this")[1].rsplit(" ", 1)[1]
    handle = HttpWorker(url, "of-the-environment", timeout=1.0)
    handle.claim("run-1", "me", "link")
    process.send_signal(signal.SIGTERM)
    with pytest.raises(PipelineError):
        handle.poll(300.0)
    process.communicate(timeout=30)
    assert process.returncode == 0
    handle.close()
    handle.release()


def test_a_port_in_use_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["worker", "--host", "127.0.0.1", "--port", str(port), *SAME_THREADS]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == (
        f"lightning-accept worker: port {port} on 127.0.0.1 is in use, perhaps by another worker;"
        " choose another with --port, or a free one with --port 0\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-file", "nowhere"], "cannot read the token file 'nowhere'"),
        (["--device", "gpu"], "there is no device 'gpu'"),
        (["--keyfile", "key.pem"], "--keyfile needs --certfile"),
        (["--allow-optimizer", "os.system"], "--allow-optimizer os.system: not an optimizer class"),
        (["--cafile", "nowhere"], "--cafile 'nowhere' is not a file"),
        (["--host", "192.0.2.1"], "choose another address with --host"),
    ],
)
def test_options_that_do_not_work_here_are_one_line_each(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert main(["worker", "--port", "0", *SAME_THREADS, *arguments]) == 2
    assert signal.getsignal(signal.SIGINT) is handler
    errors = capsys.readouterr().err
    assert errors.startswith("lightning-accept worker: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_a_worker_does_not_import_lightning() -> None:
    code = (
        "import sys, lightning_accept.remote.worker, lightning_accept.remote.embedded, lightning_accept.cli;"
        " names = {name.split('.')[0] for name in sys.modules};"
        " print(sorted(names & {'lightning', 'pytorch_lightning', 'torchvision', 'numba'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_second_signal_ends_a_hanging_stop_at_once() -> None:
    code = """
import threading, torch
from lightning_accept.remote.process import run_server
from lightning_accept.remote.server import ServerOptions
class Stuck:
    fault = None
    def start(self): pass
    def close(self):
        print("stuck", flush=True)
        threading.Event().wait()
run_server(ServerOptions(token="t"), lambda deployment, **channels: Stuck(), lambda port: print(port, flush=True))
"""
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        handle = HttpWorker(f"http://127.0.0.1:{int(process.stdout.readline())}", "t", timeout=30.0)
        handle.claim("run-1", "me", "link")
        handle.deploy(Deployment("run-1", 1, 1, 2, {}, {}, None, None, "link"))
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        handle.close()
        handle.release()
    finally:
        process.kill()
        process.communicate()
