"""Flower: rounds of federated averaging. Every device trains some steps of its own, then all weights are averaged.

The more steps a round has, the fewer bytes per sample, and the farther the devices drift apart: samples per second say
little here, only the time to an accuracy does. In its favour: batches are divided by the devices' shares of the
processor, and samples are where they are needed from the start.
"""

from __future__ import annotations

import os
import socket
import time
from argparse import Namespace
from contextlib import suppress
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import numpy as np
import torch
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg
from torch import nn

from .job import Job, Progress


def serve(job: Job, options: Namespace) -> None:
    """Average on the central node; prints a batch after each round."""
    net, progress = job.net(), Progress(job)

    def look(number: int, weights: list[Any], config: dict[str, Any]) -> None:
        if number:  # 0 is before the first round
            progress.batch()
            if job.learns:
                load(net, weights)
                progress.accuracy(net)

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=job.world,
        min_available_clients=job.world,
        initial_parameters=ndarrays_to_parameters(weights_of(net)),
        evaluate_fn=look,
        accept_failures=False,
    )
    config = ServerConfig(num_rounds=job.total // options.local_steps)
    start_server(server_address=f"{job.address}:{job.port}", config=config, strategy=strategy)


def train(job: Job, options: Namespace) -> None:
    """Train on one device, when the central node asks."""
    _wait_for(job.address, job.port)
    start_client(server_address=f"{job.address}:{job.port}", client=Device(job, options.local_steps).to_client())


def _wait_for(address: str, port: int) -> None:
    """Wait until the central node listens."""
    while True:
        with suppress(OSError), socket.create_connection((address, port), 5.0):
            return
        time.sleep(0.1)


class Device(NumPyClient):  # type: ignore[misc]
    """One device.

    Args:
        job: Its part.
        steps: Steps per round.
    """

    def __init__(self, job: Job, steps: int) -> None:
        self._job = job
        self._steps = steps
        self._net = job.net()
        self._optimizer = job.optimizer(self._net.parameters())
        self._stream = job.stream()

    def fit(self, weights: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """One round."""
        part = self._job.part
        load(self._net, weights)
        for _ in range(self._steps):
            x, y = next(self._stream)
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._net(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return weights_of(self._net), self._steps * (part.stop - part.start), {}


def weights_of(net: nn.Module) -> list[Any]:
    """Parameters and buffers."""
    return [value.numpy() for value in net.state_dict().values()]


def load(net: nn.Module, weights: list[Any]) -> None:
    """Put parameters and buffers in place; averages of counters are no whole numbers."""
    for value, new in zip(net.state_dict().values(), weights, strict=True):
        value.copy_(torch.from_numpy(np.asarray(new)))
