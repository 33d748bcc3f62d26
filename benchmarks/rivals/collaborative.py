"""hivemind: peers collect a batch together, average its gradients in 8 bits, and step.

Every peer takes samples as fast as it can, so that batches need no dividing; a batch is the next multiple of what one
step adds. In its favour: samples are where they are needed from the start, and weights are averaged rarely.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import hivemind
from hivemind.compression import Uniform8BitQuantization
from hivemind.utils import get_dht_time
from torch import Tensor, nn

from .job import Job, Progress

SAMPLES_PER_STEP = 8
MATCHMAKING = 2.0
"""Seconds in which peers look for each other before each average; the package advises 3 to 5 for small local runs."""
STATE_EVERY = 50
"""Batches between two averages of the weights."""


def train(job: Job, options: Namespace) -> None:
    """Train as one of the peers; the central node prints ``peer ADDRESS``, by which the others find it."""
    places = [f"/ip4/{job.own}/tcp/{job.port}"]
    known = [options.peer] if options.peer else None
    network = hivemind.DHT(known, start=True, host_maddrs=places, auto_nat=False, nat_port_map=False, use_relay=False)
    if job.rank == 0:
        print(f"peer {network.get_visible_maddrs()[0]}", flush=True)
    net, progress = job.net(), Progress(job)
    optimizer: Any = hivemind.Optimizer(
        dht=network,
        run_id="rivals",
        target_batch_size=job.size,
        batch_size_per_step=SAMPLES_PER_STEP,
        params=net.parameters(),
        optimizer=job.optimizer,
        matchmaking_time=MATCHMAKING,
        averaging_timeout=600.0,
        grad_compression=Uniform8BitQuantization(),
        state_averaging_compression=Uniform8BitQuantization(),
        average_state_every=STATE_EVERY,
        tracker_opts={"min_refresh_period": 0.1, "max_refresh_period": 1.0, "default_refresh_period": 0.5},
    )
    _meet(network, job)
    steps = _steps(job)
    while progress.count < job.total:
        x, y = next(steps)
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        while progress.count < optimizer.local_epoch:
            progress.batch()
            if progress.due and job.rank == 0:
                progress.accuracy(net)


def _meet(network: Any, job: Job) -> None:
    """Wait until all peers are there: the first would train alone otherwise."""
    network.store("here", True, get_dht_time() + 3600.0, subkey=job.rank)
    while True:
        found = network.get("here", latest=True)
        if found is not None and len(found.value) == job.world:
            return
        time.sleep(0.1)


def _steps(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """What this peer takes out of the batches, for ever: every peer begins elsewhere."""
    while True:
        for x, y in job.stream():
            for first in range(job.rank * SAMPLES_PER_STEP, job.size, job.world * SAMPLES_PER_STEP):
                yield x[first : first + SAMPLES_PER_STEP], y[first : first + SAMPLES_PER_STEP]
