"""With batches in flight, every stage uses exactly the weight versions that the schedule says."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.disturb import RandomDisturbance
from lightning_accept.remote.memory import MemoryCluster

RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-3
BATCH = 4


def make_stages() -> list[nn.Sequential]:
    return [
        nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
    ]


class Model(L.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        first, second, third = make_stages()
        self.net = nn.Sequential(*first, *second, nn.Dropout(dropout), *third)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


PARTITION = ["2", "5"]


def make_data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    count = batches * BATCH - 1
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def train(
    batches: int,
    *,
    epochs: int = 1,
    disturb: Any = None,
    dropout: float = 0.0,
    model: type[Model] = Model,
    **arguments: Any,
) -> Model:
    L.seed_everything(11, verbose=False)
    module = model(dropout)
    trainer_arguments = {
        name: arguments.pop(name) for name in ("accumulate_grad_batches", "max_steps") if name in arguments
    }
    cluster = MemoryCluster(2, build_stage, disturb)
    codecs = {"forward_codec": "raw", "backward_codec": "raw"}
    strategy = AccEPTStrategy(cluster.workers, partition=PARTITION, **{**codecs, **arguments})
    trainer = L.Trainer(
        max_epochs=epochs,
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_arguments,
    )
    trainer.fit(module, DataLoader(make_data(batches), BATCH))
    return module


class Stage:
    """One stage of the reference: its weights after every update, and SGD with momentum written out."""

    def __init__(self, net: nn.Sequential, window: int, predict: bool, scale: bool) -> None:
        self.net = net
        self.window = window
        self.predict = predict
        self.scale = scale
        self.versions = [{name: p.detach().clone() for name, p in net.named_parameters()}]
        self.momentum: list[dict[str, Tensor]] = [{}]

    def staleness(self, batch: int) -> int:
        """Updates that the weights for ``batch`` lack, when batches up to ``batch - window`` are updated."""
        return min(batch, self.window - 1)

    def rate(self, batch: int) -> float:
        """The learning rate of its update."""
        return RATE / max(1, self.staleness(batch)) if self.scale else RATE

    def weights(self, batch: int) -> dict[str, Tensor]:
        """The weights for ``batch``."""
        staleness = self.staleness(batch)
        updated = batch - staleness
        weights = {}
        for name, weight in self.versions[updated].items():
            velocity = self.momentum[updated].get(name)
            if self.predict and velocity is not None:
                weight = weight - staleness * self.rate(batch) * velocity
            weights[name] = weight.clone().requires_grad_()
        return weights

    def update(self, batch: int, gradients: dict[str, Tensor]) -> None:
        momentum, weights = {}, {}
        for name, weight in self.versions[-1].items():
            gradient = gradients[name] + DECAY * weight
            old = self.momentum[-1].get(name)
            momentum[name] = gradient.clone() if old is None else MOMENTUM * old + gradient
            weights[name] = weight - self.rate(batch) * momentum[name]
        self.momentum.append(momentum)
        self.versions.append(weights)


def reference(
    batches: int, windows: tuple[int, int, int], predict: bool, epochs: int = 1, scale: bool = False
) -> dict[str, Tensor]:
    """Replay the schedule in one process, batch by batch: no pipeline, no threads."""
    L.seed_everything(11, verbose=False)
    stages = [Stage(net, window, predict, scale) for net, window in zip(make_stages(), windows, strict=True)]
    for _ in range(epochs):
        for stage in stages:  # the pipeline is drained between epochs: counting begins anew
            stage.versions, stage.momentum = stage.versions[-1:], stage.momentum[-1:]
        for batch, (x, target) in enumerate(DataLoader(make_data(batches), BATCH)):
            used = [stage.weights(batch) for stage in stages]
            for stage, weights in zip(stages, used, strict=True):
                x = torch.func.functional_call(stage.net, weights, (x,))
            loss = nn.functional.cross_entropy(x, target)
            flat = [(number, name) for number, weights in enumerate(used) for name in weights]
            gradients = torch.autograd.grad(loss, [used[number][name] for number, name in flat])
            for number, stage in enumerate(stages):
                own = {name: g for (owner, name), g in zip(flat, gradients, strict=True) if owner == number}
                stage.update(batch, own)
    return {f"{n}.{name}": weight for n, stage in enumerate(stages) for name, weight in stage.versions[-1].items()}


def by_stage(module: Model) -> dict[str, Tensor]:
    net = module.net
    stages = [nn.Sequential(*net[:2]), nn.Sequential(*net[2:4]), nn.Sequential(*net[5:])]
    return {f"{n}.{name}": p.detach() for n, stage in enumerate(stages) for name, p in stage.named_parameters()}


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("batches", [12, 5, 2, 1])
def test_four_in_flight_equal_a_replay_of_the_schedule(batches: int, predict: bool) -> None:
    module = train(batches, epochs=2, in_flight=4, weight_prediction=predict)
    torch.testing.assert_close(by_stage(module), reference(batches, (4, 3, 2), predict, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("predict", [False, True])
def test_learning_rates_divided_by_staleness_equal_their_replay(predict: bool) -> None:
    module = train(12, epochs=2, in_flight=4, weight_prediction=predict, scale_lr_by_staleness=True)
    expected = reference(12, (4, 3, 2), predict, 2, scale=True)
    torch.testing.assert_close(by_stage(module), expected, rtol=1e-5, atol=1e-6)
    unscaled = reference(12, (4, 3, 2), predict, 2)
    for stage in "01":  # the last one is at most one update behind
        distance = max(float((expected[n] - unscaled[n]).abs().max()) for n in expected if n.startswith(stage))
        assert distance > 1e-3


def test_learning_rates_stay_where_nothing_is_stale() -> None:
    scaled, plain = (train(5, in_flight=1, scale_lr_by_staleness=scale) for scale in (True, False))
    for name, weight in by_stage(plain).items():
        assert torch.equal(weight, by_stage(scaled)[name])
    warm = train(3, in_flight=4, sync_warmup_steps=3, scale_lr_by_staleness=True)
    torch.testing.assert_close(by_stage(warm), reference(3, (1, 1, 1), False), rtol=1e-5, atol=1e-6)


def test_the_user_s_optimizer_keeps_its_learning_rate() -> None:
    rates = []

    class Watched(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]

    train(8, model=Watched, in_flight=4, scale_lr_by_staleness=True)
    assert rates == [RATE] * 8


def test_the_replay_differs_from_plain_training() -> None:
    """Guards the test above: if staleness were nil, it would compare equal things."""
    stale, plain = reference(12, (4, 3, 2), False), reference(12, (1, 1, 1), False)
    assert max(float((stale[name] - plain[name]).abs().max()) for name in stale) > 1e-3


def test_in_flight_two_and_auto_equal_their_replay() -> None:
    torch.testing.assert_close(by_stage(train(9, in_flight=2)), reference(9, (2, 1, 1), True), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_stage(train(9)), reference(9, (4, 3, 2), True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("in_flight", "micro_batches"), [(4, 2), (3, 2), (3, 4), (2, 2)])
def test_micro_batches_in_flight_equal_a_replay_of_the_schedule(in_flight: int, micro_batches: int) -> None:
    """Windows count jobs: a batch's version is that of its first micro-batch."""
    schedule = default_schedule(2, in_flight, micro_batches)
    # A batch's first job is forwarded once all but window - 1 jobs are backwarded; updates come at a batch's last job.
    late = [-(-(window - 1) // micro_batches) + 1 for window in schedule.windows]
    module = train(11, in_flight=in_flight, micro_batches=micro_batches)
    torch.testing.assert_close(by_stage(module), reference(11, (in_flight, *late), True), rtol=1e-5, atol=1e-6)


def test_sync_warmup_is_plain_training_at_first() -> None:
    module = train(3, in_flight=4, sync_warmup_steps=3)
    torch.testing.assert_close(by_stage(module), reference(3, (1, 1, 1), False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"in_flight": 4}, {"in_flight": 3, "micro_batches": 2}], ids=["4", "3x2"])
def test_one_seed_gives_one_result_whatever_the_network_does(arguments: dict[str, Any]) -> None:
    results = []
    for seed in (None, 1, 2):
        disturb = None if seed is None else RandomDisturbance(seed, loss=0.1, duplicate=0.1)
        module = train(10, epochs=2, disturb=disturb, dropout=0.3, **arguments)
        results.append(by_stage(module))
    for other in results[1:]:
        for name, weight in results[0].items():
            assert torch.equal(weight, other[name]), name


def test_accumulation_in_flight_updates_after_every_second_batch() -> None:
    """Deterministic with batches in flight; plain training where the warm-up keeps to one."""
    first = by_stage(train(8, in_flight=4, accumulate_grad_batches=2))
    again = by_stage(train(8, in_flight=4, accumulate_grad_batches=2, disturb=RandomDisturbance(5)))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
    plain = by_stage(train(8, in_flight=1, accumulate_grad_batches=2))
    warm = by_stage(train(8, in_flight=4, sync_warmup_steps=99, accumulate_grad_batches=2))
    torch.testing.assert_close(warm, plain, rtol=1e-5, atol=1e-6)
