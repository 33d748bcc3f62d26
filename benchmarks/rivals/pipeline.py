"""``torch.distributed.pipelining``: 1F1B over gloo, one stage per device, synchronous.

BatchNorm sees each micro-batch alone. In its favour: the labels are on the last device from the start.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from .job import Job, Progress


def train(job: Job, options: Namespace) -> None:
    """Train this device's stage."""
    job.connect()
    net = job.net()
    stages = [net[first:stop] for first, stop in pairwise([0, *options.cuts, len(net)])]
    mine, last = stages[job.rank], job.world - 1
    stage = PipelineStage(mine, job.rank, job.world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer, progress = job.optimizer(mine.parameters()), Progress(job)
    for x, y in job.stream():
        optimizer.zero_grad()
        if job.rank == 0:
            schedule.step(x)
        elif job.rank == last:
            schedule.step(target=y)
        else:
            schedule.step()
        optimizer.step()
        progress.batch()
        if progress.due:
            gather(stages, job.rank)
            if job.rank == 0:
                progress.accuracy(net)


def gather(stages: list[nn.Sequential], rank: int) -> None:
    """Bring all stages' weights and statistics to the central node."""
    for source, stage in enumerate(stages[1:], 1):
        for tensor in tensors(stage) if rank in (0, source) else ():
            if rank:
                distributed.send(tensor, 0)
            else:
                distributed.recv(tensor, source)


def tensors(stage: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers without their gradients."""
    yield from (parameter.detach() for parameter in stage.parameters())
    yield from stage.buffers()
