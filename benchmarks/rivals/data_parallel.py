"""DistributedDataParallel over gloo, with or without a hook that compresses gradients.

In its favour: batches are divided by the devices' shares of the processor, samples are where they are needed from the
start, and neither weights at the start nor BatchNorm's statistics are sent.
"""

from __future__ import annotations

from argparse import Namespace

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from .job import Job, Progress

FIRST_COMPRESSED = 2
"""Steps that PowerSGD leaves uncompressed: as few as DDP allows."""
EPSILON = 1e-8
"""What PyTorch's documentation advises against division by zero."""
ONE_BUCKET = 1024
"""MiB, more than all gradients. PowerSGD starts the later exchanges of a bucket when the earlier are over: with several
buckets these come in a different order on every device, and gloo pairs what does not belong together."""


def train(job: Job, options: Namespace) -> None:
    """Train this device's part of every batch."""
    job.connect()
    bucket = ONE_BUCKET if options.hook == "powersgd" else None
    net = DistributedDataParallel(job.net(), broadcast_buffers=False, init_sync=False, bucket_cap_mb=bucket)
    if options.hook == "fp16":
        net.register_comm_hook(None, fp16_compress_hook)
    elif options.hook == "powersgd":
        # Units that are never active leave columns of zeros, which would become NaN.
        state = PowerSGDState(None, options.powersgd_rank, FIRST_COMPRESSED, orthogonalization_epsilon=EPSILON)
        net.register_comm_hook(state, powerSGD_hook)
    optimizer, progress = job.optimizer(net.parameters()), Progress(job)
    for x, y in job.stream():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[job.part]), y[job.part], reduction="sum")
        # DDP averages over devices, whose parts differ; this makes it the mean over the batch.
        (loss * job.world / job.size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        progress.batch()
        if progress.due and job.rank == 0:
            progress.accuracy(net.module)
