"""Manual optimization with several optimizers: one batch in flight, chosen by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def two_optimizers(model: Any) -> Any:
    class Two(model):  # type: ignore[misc]
        """A generator and a critic within one pipelined module, each with its optimizer and its scheduler."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            for number, optimizer in enumerate((first, second)):
                self.toggle_optimizer(optimizer)
                loss = nn.functional.cross_entropy((1 + number) * self.net(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                self.log(f"loss {number}", loss)
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self) -> Any:
            layers = list(self.net)
            one = [p for layer in layers[:4] for p in layer.parameters()]
            other = [p for layer in layers[4:] for p in layer.parameters()]
            optimizers = [torch.optim.SGD(one, lr=0.1, momentum=0.9), torch.optim.AdamW(other, lr=0.01)]
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]

    return Two


def test_two_optimizers_that_take_turns_equal_plain_training(
    model: Any, seeded: Any, loader: Any, trainer: Any, agree: Any
) -> None:
    def run(strategy: Any) -> Any:
        module = seeded(two_optimizers(model))
        fit = trainer(strategy, max_epochs=2)
        fit.fit(module, loader(3))
        assert fit.global_step == 12
        states = [optimizer.state_dict() for optimizer in fit.optimizers]
        return {"state": module.state_dict(), "metrics": dict(fit.callback_metrics), "optimizers": states}

    agree(run)


def test_more_in_flight_is_refused(model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"manual optimization needs AccEPTStrategy\(in_flight=1\)"):
        trainer(pipeline(4)).fit(seeded(two_optimizers(model)), loader(3))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_configure_model_makes_the_layers(
    in_flight: int, model: Any, seeded: Any, loader: Any, pipeline: Any, trainer: Any
) -> None:
    class Late(model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            output: Tensor = self.net(batch[0])
            return output

    states = []
    for strategy in ("auto", pipeline(in_flight, sync_warmup_steps=99)):
        module, run = seeded(Late), trainer(strategy)
        run.fit(module, loader(3))
        run.predict(module, loader(1))
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=1e-6)
