"""Gradient clipping: plain Lightning's with one batch in flight, and the documented estimate with more."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.messages import PipelineError

RATE, BATCH = 0.5, 4

WAYS: dict[str, dict[str, Any]] = {
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
    "norm that is never reached": {"gradient_clip_val": 1e6},
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", list(WAYS))
def test_one_batch_in_flight_clips_as_plain_lightning(
    way: str, accumulate: int, seeded: Any, loader: Any, trainer: Any, agree: Any
) -> None:
    def run(strategy: Any) -> Any:
        module = seeded()
        fit = trainer(strategy, max_epochs=2, accumulate_grad_batches=accumulate, **WAYS[way])
        fit.fit(module, loader(), loader(1, seed=1))
        return module.state_dict(), fit.optimizers[0].state_dict()

    agree(run, 1e-6 if way == "norm" else 0.0)


def test_clipping_changes_the_result(seeded: Any, loader: Any, trainer: Any) -> None:
    """Guards the tests of this file: limits are such that there is something to clip."""
    states = []
    for arguments in ({}, WAYS["value"], WAYS["norm"]):
        module = seeded()
        trainer("auto", **arguments).fit(module, loader(), loader(1, seed=1))
        states.append(module.net[0].weight.detach())
    assert float((states[0] - states[1]).abs().max()) > 1e-3
    assert float((states[0] - states[2]).abs().max()) > 1e-3
    assert float((states[1] - states[2]).abs().max()) > 1e-3


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_clip_the_gradient_of_the_whole_batch(
    micro_batches: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    states = []
    for strategy in ("auto", pipeline(1, micro_batches=micro_batches)):
        module = seeded()
        trainer(strategy, **WAYS["norm"]).fit(module, loader(), loader(1, seed=1))
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


class Hooks(L.Callback):
    """Notes the order of hooks, and what the central node's gradients are then."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def on_after_backward(self, *_: Any) -> None:
        self.order.append("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.order.append("before optimizer step")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.order.append("before zero grad")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_hooks_run_in_lightnings_order_and_decide(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    hooks = Hooks()

    class Configured(model):  # type: ignore[misc]
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert (gradient_clip_val, gradient_clip_algorithm) == (0.02, "value")
            assert self.trainer.gradient_clip_val == 0.02
            hooks.order.append("clip")
            if self.global_step % 2 == 0:
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            hooks.order.append("module's")

    results = []
    for strategy in ("auto", pipeline(in_flight, sync_warmup_steps=99)):
        hooks.order.clear()
        module = seeded(Configured)
        trainer(strategy, callbacks=[hooks], **WAYS["value"]).fit(module, loader(3), loader(1, seed=1))
        results.append((list(hooks.order), module.state_dict()))
    assert results[0][0] == results[1][0]
    in_order = ["before zero grad", "after backward", "before optimizer step", "module's", "clip"]
    assert results[1][0] == in_order * 3
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-6, atol=1e-6)


def manual(model: Any, clip: Any) -> Any:
    class Manual(model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.outside = nn.Parameter(torch.ones(3))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            loss = nn.functional.cross_entropy(self.net(batch[0]) * self.outside, batch[1])
            self.manual_backward(loss)
            clip(self, first, second)
            first.step()
            first.zero_grad()
            if batch_idx % 2:
                second.step()
                second.zero_grad()

        def configure_optimizers(self) -> Any:
            parameters = list(self.parameters())
            return [torch.optim.SGD(parameters[::2], lr=0.1), torch.optim.AdamW(parameters[1::2], lr=0.01)]

    return Manual


def clip_each(module: Any, first: Any, second: Any) -> None:
    module.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    module.clip_gradients(second, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def clip_twice(module: Any, first: Any, second: Any) -> None:
    for limit in (0.05, 0.03):
        for optimizer in (first, second):
            module.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("clip", [clip_each, clip_twice])
def test_manual_optimization_clips_each_optimizers_gradients(
    clip: Any, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    """The second optimizer's gradients are clipped after every batch while they add up over two."""
    states = []
    for strategy in ("auto", pipeline("auto", module="net")):
        module = seeded(manual(model, clip))
        trainer(strategy).fit(module, loader(), loader(1, seed=1))
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=1e-6)


def test_a_norm_after_clipping_by_value_is_refused(
    model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    def clip(module: Any, first: Any, second: Any) -> None:
        module.clip_gradients(first, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        module.clip_gradients(first, gradient_clip_val=0.01, gradient_clip_algorithm="norm")

    with pytest.raises(PipelineError, match="clip them by norm first, or by one of both"):
        trainer(pipeline(module="net")).fit(seeded(manual(model, clip)), loader(), loader(1, seed=1))


# ----- in flight, against a replay


def make_stages() -> list[nn.Sequential]:
    return [
        nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
    ]


class Staged(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for stage in make_stages() for layer in stage))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def make_data(batches: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batches * BATCH, 6, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (batches * BATCH,), generator=generator)), BATCH)


def replay(
    batches: int, epochs: int, clip: dict[str, Any], windows: tuple[int, ...] = (4, 3, 2), lag: int = 2
) -> dict[str, Tensor]:
    """The schedule in one process, batch by batch, with what each stage knows when it clips."""
    L.seed_everything(11, verbose=False)
    stages = make_stages()
    versions = [[{name: p.detach().clone() for name, p in stage.named_parameters()}] for stage in stages]
    norms: list[list[float]] = []  # of every batch so far, the squared norm of each stage's own gradients
    for _ in range(epochs):
        versions, start = [of_stage[-1:] for of_stage in versions], len(norms)  # the pipeline is drained
        for batch, (x, target) in enumerate(make_data(batches)):
            used = [
                {name: weight.clone().requires_grad_() for name, weight in of_stage[max(0, batch - window + 1)].items()}
                for of_stage, window in zip(versions, windows, strict=True)
            ]
            for stage, weights in zip(stages, used, strict=True):
                x = torch.func.functional_call(stage, weights, (x,))
            loss = nn.functional.cross_entropy(x, target)
            gradients = [torch.autograd.grad(loss, list(w.values()), retain_graph=True) for w in used]
            exact = [sum(float(g.square().sum()) for g in of_stage) for of_stage in gradients]
            # The central node has completed all but `lag` of the batches before this one, all at an epoch's start.
            newest = max(start, start + batch - lag) - 1
            known = norms[newest] if newest >= 0 else None
            norms.append(exact)
            for number, (of_stage, grads) in enumerate(zip(versions, gradients, strict=True)):
                if clip["gradient_clip_algorithm"] == "value":
                    limit = clip["gradient_clip_val"]
                    clipped = [g.clamp(-limit, limit) for g in grads]
                else:
                    later = exact[number:]
                    before = [max(later)] * number if known is None else known[:number]
                    scale = min(1.0, clip["gradient_clip_val"] / (math.sqrt(sum(before) + sum(later)) + 1e-6))
                    clipped = [g * scale for g in grads]
                newer = {n: w - RATE * g for (n, w), g in zip(of_stage[-1].items(), clipped, strict=True)}
                of_stage.append(newer)
    return {f"{n}.{name}": w for n, of_stage in enumerate(versions) for name, w in of_stage[-1].items()}


def by_stage(module: Staged) -> dict[str, Tensor]:
    net = list(module.net)
    stages = [nn.Sequential(*net[:2]), nn.Sequential(*net[2:4]), nn.Sequential(*net[4:])]
    return {f"{n}.{name}": p.detach() for n, stage in enumerate(stages) for name, p in stage.named_parameters()}


def train(pipeline: Any, trainer: Any, batches: int, clip: Any, **arguments: Any) -> dict[str, Tensor]:
    L.seed_everything(11, verbose=False)
    module = Staged()
    strategy = pipeline(4, partition=["2", "4"], weight_prediction=False, **arguments)
    trainer(strategy, max_epochs=2, **clip).fit(module, make_data(batches))
    return by_stage(module)


@pytest.mark.parametrize("way", ["value", "norm"])
@pytest.mark.parametrize("batches", [9, 2])
def test_in_flight_equals_a_replay_of_the_estimate(way: str, batches: int, pipeline: Any, trainer: Any) -> None:
    expected = replay(batches, 2, WAYS[way])
    torch.testing.assert_close(train(pipeline, trainer, batches, WAYS[way]), expected, rtol=1e-5, atol=1e-6)


def test_the_replay_notices_whose_norms_are_used() -> None:
    """Guards the test above: norms of another batch give another result."""
    ours, other = replay(9, 2, WAYS["norm"]), replay(9, 2, WAYS["norm"], lag=1)
    assert max(float((ours[name] - other[name]).abs().max()) for name in ours) > 1e-4


def test_in_flight_accumulation_clips_the_sum_whatever_the_network_does(
    pipeline: Any, seeded: Any, loader: Any, trainer: Any
) -> None:
    states = []
    for _ in range(2):
        module = seeded()
        fit = trainer(pipeline(4), accumulate_grad_batches=2, max_epochs=2, **WAYS["norm"])
        fit.fit(module, loader(), loader(1, seed=1))
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_in_flight_a_second_clipping_in_one_step_is_refused(
    model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    class Twice(model):  # type: ignore[misc]
        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            for limit in (0.5, 0.1):
                self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    with pytest.raises(PipelineError, match="can be clipped once in a step"):
        trainer(pipeline(4)).fit(seeded(Twice), loader(), loader(1, seed=1))


def test_processes_clip_as_workers_in_memory(seeded: Any, loader: Any, pipeline: Any, trainer: Any) -> None:
    """Norms survive the way over a real link."""
    states = []
    codecs = {"forward_codec": "raw", "backward_codec": "raw"}
    for strategy in (AccEPTStrategy(2, in_flight=4, worker_threads=1, **codecs), pipeline(4)):
        module = seeded()
        trainer(strategy, **WAYS["norm"]).fit(module, loader(), loader(1, seed=1))
        states.append(module.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
