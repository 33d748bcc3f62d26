"""Draws what a pipeline of three devices does, from the events of a real run.

    python benchmarks/timeline.py [--out docs/timeline.png] [--trace FILE] [--rate 10mbit] [--delay MILLISECONDS]

MobileNetV2 on random images, batch 32, with workers on this machine behind links of ``--rate``, which proxies emulate
(see edge/; no root needed). The picture is the one that PipelineMonitor hands to TensorBoard, and the trace is for
Perfetto. Takes about a minute.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from pathlib import Path

import lightning as L
import torch
import torchvision
from classifier import Classifier
from edge import Host, SlowLinks
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy, PipelineMonitor
from lightning_accept.remote.tokens import new_token

SIZE = 32


def train(workers: list[str], token: str, logger: TensorBoardLogger, monitor: PipelineMonitor, batches: int) -> None:
    """Train for some batches."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batches * SIZE, 3, 32, 32), torch.randint(0, 10, (batches * SIZE,)))
    trainer = L.Trainer(
        max_epochs=1,
        strategy=AccEPTStrategy(workers=workers, token=token),
        accelerator="cpu",
        logger=logger,
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(torchvision.models.mobilenet_v2(num_classes=10)), DataLoader(data, SIZE))


def main() -> None:
    """Train, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("timeline.png"), help="file for the picture")
    parser.add_argument("--trace", type=Path, help="file for the trace")
    parser.add_argument("--rate", default="10mbit", help="of the workers' links, each way")
    parser.add_argument("--delay", type=float, default=2.0, help="milliseconds that a message takes in one direction")
    parser.add_argument("--batches", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    token = new_token()
    hosts = [Host("central"), *(Host(f"pi-{n}", arguments.rate, arguments.delay / 1000) for n in (1, 2))]
    with tempfile.TemporaryDirectory() as folder, SlowLinks(hosts) as links:
        logger = TensorBoardLogger(folder, name="timeline")
        monitor = PipelineMonitor(timeline_batches=10, trace=arguments.trace)
        train(links.start_workers(token), token, logger, monitor, arguments.batches)
        events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
        events.Reload()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(events.Images("accept/timeline")[-1].encoded_image_string)


if __name__ == "__main__":
    main()
