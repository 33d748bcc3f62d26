"""Precision, and checks of what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _default_dtype_as_before() -> Iterator[None]:
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precision_equals_plain_training(precision: str, seeded: Any, loader: Any, trainer: Any, agree: Any) -> None:
    def run(strategy: Any) -> Any:
        module = seeded()
        fit = trainer(strategy, precision=precision, max_epochs=2)
        fit.fit(module, loader(3), loader(2, seed=1))
        return {"state": module.state_dict(), "metrics": dict(fit.callback_metrics)}

    dtypes = {value.dtype for name, value in agree(run)["state"].items() if name.startswith("net")}
    assert dtypes == {{"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)}


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_dtype_within_steps_in_flight_is_not_left_behind(
    precision: str, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    """Steps that are suspended within their precision's context end in another order than they began."""
    outside, within = [], []

    class Noting(model):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            within.append(torch.get_default_dtype())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            outside.append(torch.get_default_dtype())

    trainer(pipeline(4), precision=precision).fit(seeded(Noting), loader(), loader(3, seed=1))
    assert set(outside) == {torch.float32}
    assert set(within) == {torch.float64 if precision == "64-true" else torch.bfloat16}


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision_in_flight_equals_itself_within_a_warm_up(
    precision: str, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    """With one batch in flight at a time the asynchronous way of computing is the synchronous one."""
    states = []
    for strategy in (pipeline(1), pipeline(4, sync_warmup_steps=99)):
        module = seeded()
        trainer(strategy, precision=precision).fit(module, loader())
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_accumulation_and_bf16_together(in_flight: int, seeded: Any, loader: Any, pipeline: Any, trainer: Any) -> None:
    states = []
    for strategy in ("auto", pipeline(in_flight, sync_warmup_steps=99)):
        module = seeded()
        trainer(strategy, precision="bf16-mixed", accumulate_grad_batches=2).fit(module, loader(5))
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_detect_anomaly_leaves_good_runs_alone_and_names_bad_ones(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    module = seeded()
    trainer(pipeline(in_flight), detect_anomaly=True).fit(module, loader(3))
    plain = seeded()
    trainer(pipeline(in_flight)).fit(plain, loader(3))
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)

    class Rooted(model):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = self.net(batch[0])
            return (output - output.detach()).sum().sqrt() * 0.0

    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="returned nan values"):
        trainer(pipeline(in_flight), detect_anomaly=True).fit(seeded(Rooted), loader(3))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_weights_that_are_frozen_by_a_callback_midway(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    class Freezing(model):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.net[6].requires_grad_(self.current_epoch == 0)
            if self.current_epoch == 1:
                weights = self.trainer.strategy.lightning_module_state_dict()
                self.before = {name: value.clone() for name, value in weights.items()}

    module = seeded(Freezing)
    trainer(pipeline(in_flight), max_epochs=2).fit(module, loader(3))
    after = module.state_dict()
    for layer in (0, 2, 4, 6):
        same = torch.equal(after[f"net.{layer}.weight"], module.before[f"net.{layer}.weight"])
        assert same == (layer == 6), nn.Linear
