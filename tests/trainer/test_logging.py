"""What is logged is what plain Lightning logs, at the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torchmetrics
from lightning.pytorch.callbacks import ProgressBar
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def logging(model: Any) -> Any:
    class Logging(model):  # type: ignore[misc]
        def __init__(self, lr: float = 0.05, width: int = 3) -> None:
            super().__init__(lr)
            self.save_hyperparameters()
            self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
            self.metrics = torchmetrics.MetricCollection(
                {"f1": torchmetrics.F1Score("multiclass", num_classes=3), "mean": torchmetrics.MeanMetric()}
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.log("before", x.mean(), on_step=True, on_epoch=True)
            output = self.net(x)
            loss = nn.functional.cross_entropy(output, y)
            self.train_accuracy(output, y)
            self.metrics["mean"](loss)
            self.metrics["f1"](output, y)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
            self.log_dict(dict(self.metrics.items()), on_step=False, on_epoch=True)
            self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
            self.logger.log_metrics({"by hand": float(batch_idx)}, step=self.global_step)
            return {"loss": loss, "extra": output.detach()}

    return Logging


class Bar(ProgressBar):
    """Notes what a progress bar would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["extra"].shape == (len(batch[0]), 3)
        self.shown.append(self.get_metrics(trainer, module))


def record(strategy: Any, module: Any, loader: Any, notes: Any, trainer: Any) -> Any:
    logger, bar = notes(), Bar()
    arguments = {"enable_progress_bar": True, "log_every_n_steps": 2, "max_epochs": 2}
    fit = trainer(strategy, logger=logger, callbacks=[bar], **arguments)
    fit.fit(module, loader(5), loader(2, seed=1))
    return {"logged": logger.metrics, "bar": bar.shown, "end": dict(fit.callback_metrics)}


def test_every_way_to_log_equals_plain_lightning(
    model: Any, seeded: Any, loader: Any, notes: Any, trainer: Any, agree: Any
) -> None:
    result = agree(lambda strategy: record(strategy, seeded(logging(model)), loader, notes, trainer), 1e-6)
    assert {"loss_step", "loss_epoch", "train_accuracy_epoch", "f1", "mean", "largest"} <= set(result["end"])
    assert "loss_step" in result["bar"][0]


def test_in_flight_the_same_is_logged_at_the_same_steps(
    model: Any, seeded: Any, loader: Any, notes: Any, pipeline: Any, trainer: Any
) -> None:
    plain = record("auto", seeded(logging(model)), loader, notes, trainer)
    ours = record(pipeline(4), seeded(logging(model)), loader, notes, trainer)
    for one, other in zip(plain["logged"], ours["logged"], strict=True):
        assert (one[0], set(one[1])) == (other[0], set(other[1]))
        for name in {"before_step", "before_epoch", "by hand", "epoch"} & set(one[1]):
            assert one[1][name] == pytest.approx(other[1][name]), "does not depend on the weights"
    assert [set(shown) for shown in plain["bar"]] == [set(shown) for shown in ours["bar"]]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_hyper_parameters_are_logged_saved_and_restored(
    in_flight: int, model: Any, seeded: Any, loader: Any, notes: Any, pipeline: Any, trainer: Any, tmp_path: Any
) -> None:
    logger, kind = notes(), logging(model)
    fit = trainer(pipeline(in_flight), logger=logger, limit_train_batches=2)
    fit.fit(seeded(kind, lr=0.01, width=4), loader())
    assert logger.hyper_parameters == {"lr": 0.01, "width": 4}
    fit.save_checkpoint(tmp_path / "a.ckpt")
    assert dict(kind.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).hparams) == {"lr": 0.01, "width": 4}
