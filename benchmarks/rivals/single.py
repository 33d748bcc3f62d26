"""One device alone: the plain loop."""

from __future__ import annotations

from argparse import Namespace

from torch import nn

from .job import Job, Progress


def train(job: Job, options: Namespace) -> None:
    """Train on this device."""
    net, progress = job.net(), Progress(job)
    optimizer = job.optimizer(net.parameters())
    for x, y in job.stream():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        progress.batch()
        if progress.due:
            progress.accuracy(net)
