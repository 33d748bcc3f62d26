"""PipelineMonitor: every metric in the logger, the picture in TensorBoard, and a trace that makes sense."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy, PipelineMonitor, PredictorFeedback
from lightning_accept.callbacks import monitor as monitor_module
from lightning_accept.latency.profile import Profile, ProfileRequest
from lightning_accept.latency.submodels import Measurement
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

BATCHES = 12


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(5)]
        self.net = nn.Sequential(*blocks, nn.Linear(64, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(*callbacks: Any, strategy: Any = None, epochs: int = 2, logger: Any = False, **arguments: Any) -> L.Trainer:
    if strategy is None:
        strategy = AccEPTStrategy(workers=MemoryCluster(2, build_stage).workers)
    trainer = L.Trainer(
        max_epochs=epochs,
        strategy=strategy,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    data = DataLoader(TensorDataset(torch.randn(16 * BATCHES, 64)), 16)
    trainer.fit(Model(), data, data)
    return trainer


def spans(trace: Path) -> list[dict[str, Any]]:
    return [entry for entry in json.loads(trace.read_text())["traceEvents"] if entry["ph"] == "X"]


def check_structure(entries: list[dict[str, Any]]) -> None:
    """No two things are computed at once on one stage, and every forward has its backward."""
    computed = [entry for entry in entries if entry["tid"] == 0]
    for stage in {entry["pid"] for entry in computed}:
        mine = sorted(
            (entry["ts"], entry["ts"] + entry["dur"], entry["name"]) for entry in computed if entry["pid"] == stage
        )
        for (_, end, name), (start, _, following) in itertools.pairwise(mine):
            assert start >= end - 0.2, f"{name} and {following} overlap on stage {stage}"  # a tenth of a µs is rounded
    jobs = {
        kind: Counter((e["pid"], e["args"]["term"], e["args"]["job"]) for e in computed if e["cat"] == kind)
        for kind in ("forward", "backward")
    }
    assert jobs["forward"] == jobs["backward"]
    assert set(jobs["forward"].values()) == {1}


def test_tensorboard_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("matplotlib")
    logger = TensorBoardLogger(tmp_path, name="run")
    links = MemoryCluster(2, build_stage, links=lambda source, target: Speed(1e6, 1e-3))
    strategy = AccEPTStrategy(workers=links.workers, in_flight=3, partition=[2, 4], compress_output=True)
    fit(PipelineMonitor(every_n_batches=4, timeline_batches=3), strategy=strategy, logger=logger)
    events = accumulator.EventAccumulator(logger.log_dir, size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    expected = {"accept/period_seconds", "accept/in_flight", "accept/bits_forward", "accept/bits_backward"}
    for stage in range(3):
        names = ["forward_seconds", "backward_seconds", "step_seconds", "waiting_seconds", "busy", "staleness"]
        names += ["layers", "memory_bytes", *(["queued", "outstanding"] if stage else [])]
        expected |= {f"accept/stage_{stage}/{name}" for name in names}
    ways = {"activation": [(0, 1), (1, 2), (2, 0)], "gradient": [(0, 2), (2, 1), (1, 0)]}
    for what, ends in ways.items():
        names = ["bytes", "raw_bytes", "encode_seconds", "quantisation_error"]
        expected |= {f"accept/link_{a}_{b}/{what}_{name}" for a, b in ends for name in names}
    assert expected <= set(last)
    assert all(math.isfinite(value) and value >= 0 for value in last.values())
    assert (last["accept/bits_forward"], last["accept/bits_backward"], last["accept/in_flight"]) == (4, 8, 3)
    assert [last[f"accept/stage_{stage}/layers"] for stage in range(3)] == [2, 2, 2]
    assert [last[f"accept/stage_{stage}/staleness"] for stage in range(3)] == [2, 1, 0]
    assert all(0 < last[f"accept/stage_{stage}/busy"] <= 1 for stage in range(3))
    # Four bits and eight instead of 32, and no evaluation among them, which travels as it is.
    assert last["accept/link_0_1/activation_raw_bytes"] == 4 * 64 * 16
    assert last["accept/link_0_1/activation_bytes"] < 0.5 * last["accept/link_0_1/activation_raw_bytes"]
    assert last["accept/link_1_0/gradient_bytes"] < 0.5 * last["accept/link_1_0/gradient_raw_bytes"]
    text = events.Tensors("accept/partition/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "net.0" in text or "| 0 | central node | 2 |" in text
    pictures = events.Images("accept/timeline")
    assert [picture.step for picture in pictures] == [BATCHES, 2 * BATCHES]
    image = np.asarray(Image.open(io.BytesIO(pictures[-1].encoded_image_string)))
    assert image.dtype == np.uint8 and image.shape[1:] == (1200, 3) and image.std() > 1


@pytest.mark.parametrize(
    "options",
    [{"in_flight": 4}, {"in_flight": 1}, {"in_flight": 2, "micro_batches": 2}],
    ids=["in flight", "synchronous", "micro-batches"],
)
def test_the_trace_makes_sense(tmp_path: Path, options: dict[str, Any]) -> None:
    trace = tmp_path / "trace.json"
    strategy = AccEPTStrategy(workers=MemoryCluster(2, build_stage).workers, **options)
    fit(PipelineMonitor(every_n_batches=5, trace=trace), strategy=strategy)
    entries = spans(trace)
    check_structure(entries)
    forwards = Counter(entry["pid"] for entry in entries if entry["cat"] == "forward")
    assert forwards == dict.fromkeys(range(3), 2 * BATCHES * options.get("micro_batches", 1))
    begun = {(e["pid"], e["args"]["job"]): e for e in entries if e["cat"] == "forward" and e["args"]["term"] == 1}
    for job in {job for _, job in begun}:
        ends = [begun[stage, job]["ts"] + begun[stage, job]["dur"] for stage in range(3)]
        starts = [begun[stage, job]["ts"] for stage in range(3)]
        assert ends[0] <= starts[1] + 0.2 and ends[1] <= starts[2] + 0.2  # all in one process, so one clock


def test_the_trace_over_http_and_through_moves(tmp_path: Path) -> None:
    class Wanderer(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 5 == 2:
                foresight = trainer.strategy.foresight
                foresight.fix_partition([1, 3] if batch_idx % 10 == 2 else [2, 4])
                trainer.strategy.repartition(foresight.plan())

    trace = tmp_path / "trace.json"
    strategy = AccEPTStrategy(workers=2, worker_threads=1, latency="measured", in_flight=3)
    fit(PipelineMonitor(every_n_batches=3, trace=trace), Wanderer(), strategy=strategy)
    entries = spans(trace)
    assert len({entry["args"]["term"] for entry in entries}) > 2
    check_structure(entries)
    forwards = Counter(entry["pid"] for entry in entries if entry["cat"] == "forward")
    assert forwards == dict.fromkeys(range(3), 2 * BATCHES)


def test_predicted_and_measured_times(tmp_path: Path) -> None:
    def profile(address: str, request: ProfileRequest) -> Profile:
        return Profile(tuple(Measurement(a, b, 0.25 * (b - a), 0.5 * (b - a)) for a, b in request.spans))

    def columns(*callbacks: Any) -> set[str]:
        cluster = MemoryCluster(2, build_stage, profiler=profile, links=lambda source, target: Speed(1e9, 1e-4))
        logger = CSVLogger(tmp_path, name="run")
        strategy = AccEPTStrategy(workers=cluster.workers, latency="measured", partition=[2, 4])
        fit(*callbacks, strategy=strategy, logger=logger, epochs=1)
        with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert any(row.get("accept/stage_1/predicted_seconds") == "1.5" for row in rows)
        return set(rows[0])

    alone = columns(PipelineMonitor(every_n_batches=4))
    assert "accept/stage_2/measured_seconds" in alone
    assert columns(PipelineMonitor(every_n_batches=4), PredictorFeedback(every_n_batches=4, threshold=1e9))


def test_without_matplotlib_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor_module, "_can_draw", lambda: False)
    with caplog.at_level(logging.INFO, "lightning_accept"):
        fit(PipelineMonitor(), logger=TensorBoardLogger(tmp_path))
    assert sum("install matplotlib" in record.message for record in caplog.records) == 1


def test_with_another_strategy_it_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(PipelineMonitor(trace=tmp_path / "trace.json"), strategy="auto")
    assert "PipelineMonitor does nothing" in caplog.text
    assert not (tmp_path / "trace.json").exists()


def test_an_error_in_training_leaves_a_trace_that_can_be_read(tmp_path: Path) -> None:
    class Breaking(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 8:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(PipelineMonitor(every_n_batches=2, trace=tmp_path / "trace.json"), Breaking())
    json.loads((tmp_path / "trace.json").read_text())


def test_twice_in_a_row(tmp_path: Path) -> None:
    monitor = PipelineMonitor(every_n_batches=4, trace=tmp_path / "trace.json")
    for _ in range(2):
        fit(monitor, epochs=1)
        check_structure(spans(tmp_path / "trace.json"))


@pytest.mark.parametrize("options", [{"every_n_batches": 0}, {"timeline_batches": 0}])
def test_arguments_that_cannot_work(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give a number from 1"):
        PipelineMonitor(**options)
