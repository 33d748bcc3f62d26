"""Runs one device's part: ``python -m rivals METHOD --shares ...``, in the folder of the benchmarks.

Prints ``ready`` when all is imported and the data are there, then what :class:`Progress` prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable

import torch

from .job import RANDOM, Job

METHODS = ("single", "pipeline", "data-parallel", "ours", "hivemind", "flower", "flower-server")


def choose(method: str) -> Callable[[Job, argparse.Namespace], None]:
    """What trains by ``method``; only what it needs is imported."""
    if method == "single":
        from .single import train
    elif method == "pipeline":
        from .pipeline import train
    elif method == "data-parallel":
        from .data_parallel import train
    elif method == "ours":
        from .ours import train
    elif method == "hivemind":
        from .collaborative import train
    elif method == "flower":
        from .federated import train
    else:
        from .federated import serve as train
    return train


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--rank", type=int, default=0, help="number of this device, 0 for the central node")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0], help="of the processor, of all devices")
    parser.add_argument("--address", default="127.0.0.1", help="the central node's")
    parser.add_argument("--own", default="127.0.0.1", help="this device's address")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--batches", type=int, default=8, help="on random images")
    parser.add_argument("--epochs", type=int, default=1, help="on real ones")
    parser.add_argument("--size", type=int, default=128, help="samples per batch")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--data", default=RANDOM, help="random, or the folder of mnist.npz")
    parser.add_argument("--cuts", type=int, nargs="*", default=[], help="pipeline: first layers of the later stages")
    parser.add_argument("--micro-batches", type=int, default=4, help="pipeline")
    parser.add_argument("--hook", choices=["none", "fp16", "powersgd"], default="none", help="data parallel")
    parser.add_argument("--powersgd-rank", type=int, default=2)
    parser.add_argument("--workers", nargs="+", default=[], help="ours: URLs")
    parser.add_argument("--our-method", default="ours", help="ours: one of methods.py")
    parser.add_argument("--predictor", help="ours: file of a latency predictor, for methods that need one")
    parser.add_argument("--sync", type=int, default=0, help="ours: batches at the start with one in flight")
    parser.add_argument("--in-flight", type=int, help="ours")
    parser.add_argument("--scale-lr", action="store_true", help="ours: divide learning rates by staleness")
    parser.add_argument("--starts", type=int, nargs="+", help="ours: first layers of the workers' stages")
    parser.add_argument("--peer", help="hivemind: what the central node has printed")
    parser.add_argument("--local-steps", type=int, default=10, help="flower: steps per round")
    return parser.parse_args()


def main() -> None:
    """Train once."""
    options = parse()
    torch.set_num_threads(1)
    train = choose(options.method)
    job = Job(
        rank=options.rank,
        shares=tuple(options.shares),
        address=options.address,
        own=options.own,
        port=options.port,
        batches=options.batches,
        epochs=options.epochs,
        size=options.size,
        learning_rate=options.learning_rate,
        data=options.data,
    )
    print(f"ready, {job.total} batches", flush=True)
    try:
        train(job, options)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads and processes of a library must not keep alive what has failed


if __name__ == "__main__":
    main()
