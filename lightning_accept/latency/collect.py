"""Collecting a data set: all sub-models of a model, under many conditions of this machine."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lightning_accept.graph import Chain, Trace
from lightning_accept.latency.conditions import Condition
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.model_facts import ModelFacts
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.submodels import Measurement, all_spans
from lightning_accept.signals import raised_signals

# The path comes along, so that the package is found as it is here.
_BOOT = (
    "import sys; sys.path.pop(0); import json; config = json.loads(sys.stdin.readline());"
    " sys.path[:] = config.pop('path'); from lightning_accept.latency.sweep import main;"
    " sys.exit(main(config, sys.stdout))"
)


class CollectError(RuntimeError):
    """A process that measured has failed."""


def collect(
    trace: Trace,
    name: str,
    conditions: Sequence[Condition],
    path: str | os.PathLike[str],
    *,
    seconds: float = 120.0,
    machine: str | None = None,
    on_progress: Callable[[Condition, float], None] = lambda condition, share: None,
) -> Dataset:
    """Measure all sub-models of a traced module on this machine's CPU, each condition in a process of its own.

    The file is written after every condition; those that it holds already are left out, so that an interrupted
    collection goes on where it was.

    Args:
        trace: The module.
        name: What to call the model.
        conditions: The conditions.
        path: The data set's file.
        seconds: Time per condition; a slow one takes as long as it needs to meet every sub-model once.
        machine: Put before the names of the configurations, where several machines' are to be merged.
        on_progress: Told of the share of a condition that is done.

    Raises:
        CollectError: If a process fails; the message holds what it printed.
        ValueError: If the file belongs to another model.
    """
    chain = Chain.from_trace(trace)
    spans = all_spans(len(chain.layers))
    dataset = Dataset(ModelFacts.of(chain, name), ())
    if Path(path).exists():
        dataset = Dataset.merge([dataset, Dataset.load(path)])
    known = {configuration.name for configuration in dataset.configurations}
    with raised_signals(), tempfile.TemporaryDirectory() as folder:
        for condition in conditions:
            title = condition.name if machine is None else f"{machine}: {condition.name}"
            if title in known:
                continue
            request = ProfileRequest.of(chain, trace, spans, autocast=condition.autocast)
            file = os.path.join(folder, "request.safetensors")
            write_request(request, file)
            measured, repeats = _measure(condition, file, seconds, lambda share: on_progress(condition, share))  # noqa: B023
            facts = {
                **condition.describe(),
                "machine": platform.machine(),
                "system": platform.system(),
                "torch": str(torch.__version__),
            }
            done = Configuration(title, tuple(measured), tuple(repeats), facts)
            dataset = Dataset(dataset.model, (*dataset.configurations, done))
            dataset.save(path)
    return dataset


def write_request(request: ProfileRequest, path: str) -> None:
    """Write a request as one safetensors file."""
    message, tensors = request.to_message()
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, path, {"message": json.dumps(message)})


def read_request(path: str) -> ProfileRequest:
    """The inverse of :func:`write_request`."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        return ProfileRequest.from_message(json.loads(file.metadata()["message"]), tensors)


def _measure(
    condition: Condition, request: str, seconds: float, on_progress: Callable[[float], None]
) -> tuple[list[Measurement], list[Measurement]]:
    config = {
        "path": [entry or os.getcwd() for entry in sys.path],
        "condition": asdict(condition),
        "request": request,
        "seconds": seconds,
        "parent": os.getpid(),
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **condition.environment()},
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(config) + "\n")
                process.stdin.close()
            result: dict[str, Any] = {}
            for line in process.stdout:
                result = json.loads(line)
                if "progress" in result:
                    on_progress(result["progress"])
            if process.wait() != 0 or "measured" not in result:
                errors.seek(0)
                raise CollectError(
                    f"measuring under {condition.name!r} ended with exit code {process.returncode}; it printed:\n"
                    + "\n".join(errors.read().splitlines()[-30:])
                )
        finally:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
    on_progress(1.0)
    measured, repeats = (
        [
            Measurement(first, stop, *(math.inf if value is None else value for value in times))
            for first, stop, *times in result[name]
        ]
        for name in ("measured", "repeats")
    )
    return measured, repeats
