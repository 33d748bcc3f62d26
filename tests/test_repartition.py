"""Layers that move while training: nothing about the result changes, and they move when and only when it pays."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torchvision
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy, PredictorFeedback, Repartition
from lightning_accept.latency.profile import Profile, ProfileRequest
from lightning_accept.latency.submodels import Measurement
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.foresight import Foresight
from lightning_accept.pipeline.messages import StageReport
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

raw_strategy = partial(AccEPTStrategy, forward_codec="raw", backward_codec="raw")
CLASSES = 5
SECONDS = 0.04


class Devices:
    """Pretends speeds: what is measured on devices, and what their stages report, comes from here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, speeds: Sequence[float], noise: float = 0.0) -> None:
        self.speeds = list(speeds)
        self.noise = noise
        self.random = random.Random(0)
        monkeypatch.setattr(
            "lightning_accept.strategy.run_profile", lambda request, device: self.profile("central node", request)
        )
        note = Foresight.note
        monkeypatch.setattr(
            Foresight, "note", lambda foresight, reports, rest: note(foresight, self.reports(foresight), 0.001)
        )
        self.cluster = MemoryCluster(
            len(speeds) - 1, build_stage, profiler=self.profile, links=lambda source, target: Speed(1e9, 1e-4)
        )

    def profile(self, address: str, request: ProfileRequest) -> Profile:
        number = 0 if address == "central node" else int(address.rsplit("/", 1)[1])
        each = SECONDS / self.speeds[number]
        return Profile(tuple(Measurement(a, b, (b - a) * each / 3, (b - a) * each * 2 / 3) for a, b in request.spans))

    def reports(self, foresight: Foresight) -> dict[int, StageReport]:
        if foresight.forecast is None:
            return {}
        reports = {}
        for stage, load in enumerate(foresight.forecast.plan.stages):
            seconds = (load.stop - load.first) * SECONDS / self.speeds[load.device]
            seconds *= self.random.uniform(1 - self.noise, 1 + self.noise)
            reports[stage] = StageReport(seconds / 3, seconds * 2 / 3)
        return reports


class Classifier(L.LightningModule):
    def __init__(self, net: nn.Module, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=2e-3)
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)


class Wanderer(L.Callback):
    """Moves to another partition every few batches, whatever that is good for."""

    def __init__(self, every: int, partitions: Sequence[Sequence[int]]) -> None:
        self.every = every
        self.partitions = itertools.cycle(partitions)
        self.reports: list[Any] = []
        self.seen: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        self.seen.append([len(stage) for stage in strategy.partition])
        if (batch_idx + 1) % self.every == 0:
            strategy.foresight.fix_partition(next(self.partitions))
            strategy.repartition(strategy.foresight.plan(), self.reports.append)


def fit(module: Classifier, data: TensorDataset, strategy: Any, callbacks: Sequence[Any] = (), **arguments: Any) -> Any:
    trainer = L.Trainer(
        **{"max_epochs": 1, "logger": False, **arguments},
        strategy=strategy,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 4))
    return trainer


def small_net(layers: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))


def small_data(batches: int) -> TensorDataset:
    return TensorDataset(torch.randn(4 * batches, 8), torch.randint(0, CLASSES, (4 * batches,)))


@pytest.mark.parametrize(("model", "optimizer"), [("mobilenet_v2", "sgd"), ("resnet18", "adamw")])
def test_moving_every_five_batches_equals_plain_training_to_the_bit(
    model: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(strategy: Any, callbacks: Sequence[Any] = ()) -> Any:
        L.seed_everything(7, verbose=False)
        data = TensorDataset(torch.randn(79, 3, 32, 32), torch.randint(0, CLASSES, (79,)))
        module = Classifier(getattr(torchvision.models, model)(num_classes=CLASSES), optimizer)
        trainer = fit(module, data, strategy, callbacks)
        return module.state_dict(), trainer.optimizers[0].state_dict()["state"]

    plain = train("auto")
    devices = Devices(monkeypatch, [1.0, 1.0, 1.0])
    wanderer = Wanderer(5, [(1, 2), (4, 6), (2, 7)])
    moved = train(raw_strategy(devices.cluster.workers, in_flight=1, latency="measured"), [wanderer])
    assert len(wanderer.reports) == 3
    assert all(report.layers > 0 for report in wanderer.reports)
    torch.testing.assert_close(moved, plain, rtol=0, atol=0)


@pytest.mark.parametrize("batches", [6, 7])
def test_moving_within_gradient_accumulation_loses_nothing(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(strategy: Any, callbacks: Sequence[Any] = ()) -> Any:
        L.seed_everything(7, verbose=False)
        module = Classifier(small_net())
        fit(module, small_data(24), strategy, callbacks, accumulate_grad_batches=4)
        return module.state_dict()

    plain = train("auto")
    devices = Devices(monkeypatch, [1.0, 1.0, 1.0])
    wanderer = Wanderer(batches, [(1, 2), (5, 7), (2, 3)])
    moved = train(raw_strategy(devices.cluster.workers, in_flight=1, latency="measured"), [wanderer])
    assert len(wanderer.reports) == 3
    torch.testing.assert_close(moved, plain, rtol=1e-6, atol=1e-6)


def test_moving_with_batches_in_flight_drains_and_sees_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, [1.0, 1.0, 1.0])
    wanderer = Wanderer(5, [(1, 2), (4, 6), (2, 7)])
    module = Classifier(small_net())
    strategy = raw_strategy(devices.cluster.workers, in_flight=4, latency="measured")
    trainer = fit(module, small_data(40), strategy, [wanderer], max_epochs=2)
    assert trainer.global_step == 80
    assert len(wanderer.reports) == 15  # asked for 16 times, the last time after the last batch
    assert [1, 1, 6] in wanderer.seen
    assert [4, 2, 2] in wanderer.seen
    assert [2, 5, 1] in wanderer.seen
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_slowed_worker_loses_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    devices = Devices(monkeypatch, [1.0, 1.0, 1.0])
    sizes: list[list[int]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            sizes.append([len(stage) for stage in trainer.strategy.partition])
            if len(sizes) == 40:
                devices.speeds[1] /= 3

    repartition = Repartition(every_n_batches=1000, cooldown=100)
    logger = CSVLogger(tmp_path)
    strategy = raw_strategy(devices.cluster.workers, latency="measured")
    with caplog.at_level(logging.INFO, "lightning_accept"):
        fit(
            Classifier(small_net()),
            small_data(150),
            strategy,
            [Watch(), PredictorFeedback(every_n_batches=10), repartition],
            logger=logger,
            log_every_n_steps=1,
        )
    assert sizes[0] == sizes[49] == [3, 3, 2]
    assert sizes[-1] == [3, 1, 4]
    assert repartition.moves == 1
    lines = [record.getMessage() for record in caplog.records]
    (feedback,) = [line for line in lines if line.startswith("feedback:")]
    assert "stage 1 (memory://1)" in feedback
    assert "3.00 times as long" in feedback
    (moved,) = [line for line in lines if line.startswith("repartition:")]
    assert "moved 2 layers" in moved
    assert len([line for line in lines if line.startswith("plan:")]) == 1
    logger.save()
    names = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    for name in ("stage_1/predicted_seconds", "stage_1/measured_seconds", "repartitions", "predicted_period"):
        assert f"accept/{name}" in names


def test_noise_of_a_fifth_moves_nothing_in_500_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, [1.0, 2.0, 1.5], noise=0.2)
    repartition = Repartition(every_n_batches=20, cooldown=0)
    strategy = raw_strategy(devices.cluster.workers, latency="measured")
    fit(
        Classifier(small_net(20)),
        small_data(500),
        strategy,
        [PredictorFeedback(every_n_batches=20), repartition],
    )
    assert repartition.moves == 0


def test_while_a_move_waits_for_the_drain_no_other_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, without a cooldown, the same move was asked for again with every batch that the drain took."""
    devices = Devices(monkeypatch, [1.0, 1.0, 1.0])
    repartition = Repartition(every_n_batches=1, cooldown=0)
    made_before: list[int] = []
    ask = AccEPTStrategy.repartition

    def asked(strategy: AccEPTStrategy, *arguments: Any) -> None:
        made_before.append(repartition.moves)
        ask(strategy, *arguments)

    monkeypatch.setattr(AccEPTStrategy, "repartition", asked)

    class Slow(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 9:
                devices.speeds[1] /= 3

    strategy = raw_strategy(devices.cluster.workers, in_flight=4, latency="measured")
    fit(Classifier(small_net()), small_data(60), strategy, [Slow(), PredictorFeedback(every_n_batches=5), repartition])
    assert repartition.moves > 0
    assert made_before == list(range(repartition.moves))


def test_a_move_that_does_not_pay_off_any_more_is_not_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(monkeypatch, [1.0, 1.0, 1.0])

    class Slow(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.strategy.foresight.deployed(trainer.strategy.foresight.forecast, 1000.0)
            devices.speeds[1] = 0.2
            trainer.strategy.foresight.measure([1])

    repartition = Repartition(every_n_batches=10)
    with caplog.at_level(logging.INFO, "lightning_accept"):
        strategy = raw_strategy(devices.cluster.workers, latency="measured")
        fit(Classifier(small_net()), small_data(30), strategy, [Slow(), repartition])
    assert repartition.moves == 0
    assert "not worth the move" in caplog.text


@pytest.mark.parametrize("callback", [PredictorFeedback(), Repartition()])
def test_without_measuring_the_callbacks_say_that_they_do_nothing(
    callback: L.Callback, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = MemoryCluster(2, build_stage)
    with caplog.at_level(logging.INFO, "lightning_accept"):
        fit(Classifier(small_net()), small_data(3), raw_strategy(cluster.workers), [callback])
        fit(Classifier(small_net()), small_data(3), "auto", [callback])
    name = type(callback).__name__
    assert f"{name} does nothing, since no device is measured" in caplog.text
    assert f"{name} does nothing: it needs AccEPTStrategy, not SingleDeviceStrategy" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PredictorFeedback(every_n_batches=0), "every_n_batches=0"),
        (lambda: PredictorFeedback(threshold=0.0), "threshold=0.0"),
        (lambda: Repartition(every_n_batches=0), "every_n_batches=0"),
        (lambda: Repartition(min_gain=1.0), "min_gain=1.0"),
        (lambda: Repartition(cooldown=-1), "cooldown=-1"),
        (lambda: AccEPTStrategy(latency="fast"), "latency='fast'"),
        (lambda: AccEPTStrategy(micro_batches="many"), "micro_batches='many'"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_worker_left_out_of_the_plan_idles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    devices = Devices(monkeypatch, [1.0, 1.0, 0.01])
    strategy = raw_strategy(devices.cluster.workers, latency="measured", leave_out=True)
    with caplog.at_level(logging.INFO, "lightning_accept"):
        trainer = fit(Classifier(small_net()), small_data(12), strategy)
    assert trainer.global_step == 12
    assert "memory://2 left out: a batch would take" in caplog.text


def test_plan_and_schedule_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, [1.0, 2.0, 1.0])
    found: list[Any] = []

    class Ask(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append((trainer.strategy.plan, trainer.strategy.schedule))

    fit(Classifier(small_net()), small_data(4), raw_strategy(devices.cluster.workers, latency="measured"), [Ask()])
    plan, schedule = found[-1]
    assert [stage.name for stage in plan.stages] == ["central node", "memory://1", "memory://2"]
    assert plan.boundaries == (0, 2, 6)
    assert schedule.in_flight >= 2
