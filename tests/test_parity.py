"""The anchor: one batch in flight, without a codec, is ordinary training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

CLASSES = 5
raw_strategy = partial(AccEPTStrategy, forward_codec="raw", backward_codec="raw")


@pytest.fixture(autouse=True)
def _one_way_to_compute() -> Iterator[None]:
    # PyTorch evaluates transformer layers by a fused kernel, whose last bit differs from that of training on some
    # processors. Stages have training's graph, so plain Lightning must compute likewise to be compared to the bit.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Classifier(L.LightningModule):
    """An ordinary LightningModule around any network."""

    def __init__(self, net: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.net(*inputs)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, target = batch
        loss = nn.functional.cross_entropy(self(*inputs), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        *inputs, target = batch
        output = self(*inputs)
        self.accuracy(output, target)
        self.log("val_loss", nn.functional.cross_entropy(output, target))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SmallViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 24, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 16, 24) * 0.02)
        layers = [nn.TransformerEncoderLayer(24, 4, 48, 0.0, batch_first=True, norm_first=True) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        result: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return result


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24, padding_idx=0)
        layer = nn.TransformerEncoderLayer(24, 4, 48, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0).sum(1)
        result: Tensor = self.head(x)
        return result


def cnn_1d() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(3, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.MaxPool1d(2)),
        *(nn.Conv1d(16, 24, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, CLASSES)),
    )


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def tokens(count: int) -> Tensor:
    lengths = torch.randint(3, 12, (count, 1))
    return torch.randint(1, 50, (count, 12)).masked_fill(torch.arange(12) >= lengths, 0)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(num_classes=CLASSES, dropout=0.2), images),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), images),
    "vit": (SmallViT, images),
    "text": (TextClassifier, tokens),
    "cnn_1d": (cnn_1d, lambda count: torch.randn(count, 3, 40)),
}
WITHOUT_BATCH_NORM = ["vit", "text"]


def memory_workers(count: int = 2) -> list[Any]:
    return list(MemoryCluster(count, build_stage).workers)


def train(
    model: str,
    optimizer: str,
    strategy: Any,
    *,
    batches: int = 20,
    batch_size: int = 4,
    last: int = 3,
    **arguments: Any,
) -> tuple[Classifier, dict[str, Any]]:
    """Fit from a fixed seed; returns the module and all that it logged."""
    make_net, make_inputs = MODELS[model]
    L.seed_everything(7, verbose=False)
    count = (batches - 1) * batch_size + last
    data = TensorDataset(make_inputs(count), torch.randint(0, CLASSES, (count,)))
    validation = TensorDataset(make_inputs(7), torch.randint(0, CLASSES, (7,)))
    module = Classifier(make_net(), optimizer)
    recorder = Recorder()
    trainer = L.Trainer(
        **{"max_epochs": 1, **arguments},
        strategy=strategy,
        callbacks=[recorder],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module, DataLoader(data, batch_size, shuffle=True), DataLoader(validation, batch_size), weights_only=None
    )
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    return module, {"losses": recorder.losses, **metrics, "states": states}


def assert_equal(
    ours: tuple[Classifier, dict[str, Any]], plain: tuple[Classifier, dict[str, Any]], tolerance: float
) -> None:
    expected = plain[0].state_dict()
    actual = ours[0].state_dict()
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], plain[1], rtol=tolerance, atol=tolerance)
    assert len(ours[1]["losses"]) > 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", list(MODELS))
def test_one_batch_in_flight_equals_plain_training_to_the_bit(model: str, optimizer: str) -> None:
    plain = train(model, optimizer, "auto")
    ours = train(model, optimizer, raw_strategy(memory_workers(), in_flight=1))
    assert_equal(ours, plain, 0.0)


@pytest.mark.parametrize("model", ["resnet18", "text"])
def test_gradient_accumulation_equals_plain_training(model: str) -> None:
    arguments = {"accumulate_grad_batches": 2, "batches": 7}
    plain = train(model, "sgd", "auto", **arguments)
    ours = train(model, "sgd", raw_strategy(memory_workers(), in_flight=1), **arguments)
    assert_equal(ours, plain, 1e-6)


@pytest.mark.parametrize("model", WITHOUT_BATCH_NORM)
def test_micro_batches_equal_plain_training_without_batch_norm(model: str) -> None:
    plain = train(model, "sgd", "auto", batch_size=6)
    ours = train(model, "sgd", raw_strategy(memory_workers(), in_flight=1, micro_batches=4), batch_size=6)
    assert_equal(ours, plain, 1e-5)


def test_frozen_parameters_stay_and_do_not_disturb() -> None:
    def freeze(module: nn.Module) -> nn.Module:
        for parameter in list(module.parameters())[:40]:
            parameter.requires_grad_(False)
        return module

    make_net, make_inputs = MODELS["mobilenet_v2"]
    MODELS["frozen"] = (lambda: freeze(make_net()), make_inputs)
    try:
        plain = train("frozen", "sgd", "auto", batches=4)
        ours = train("frozen", "sgd", raw_strategy(memory_workers(), in_flight=1), batches=4)
    finally:
        del MODELS["frozen"]
    assert_equal(ours, plain, 0.0)


def test_bf16_mixed_equals_plain_training() -> None:
    arguments = {"precision": "bf16-mixed", "batches": 5}
    plain = train("resnet18", "adamw", "auto", **arguments)
    ours = train("resnet18", "adamw", raw_strategy(memory_workers(), in_flight=1), **arguments)
    assert_equal(ours, plain, 0.0)


def test_embedded_workers_equal_plain_training_to_the_bit() -> None:
    plain = train("mobilenet_v2", "sgd", "auto", batches=6)
    ours = train("mobilenet_v2", "sgd", raw_strategy(2, in_flight=1, worker_threads=1), batches=6)
    assert_equal(ours, plain, 0.0)
