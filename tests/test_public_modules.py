"""Lightning's own test models, and modules of the kinds that people publish, through three stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import (
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    Net,
    RandomDataset,
)
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def loader(*shapes: tuple[int, ...], classes: int = 0, count: int = 12, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(count, *shape, generator=generator) for shape in shapes]
    if classes:
        tensors.append(torch.randint(0, classes, (count,), generator=generator))
    return DataLoader(TensorDataset(*tensors), batch_size)


def run(make: Callable[[], L.LightningModule], data: Any, strategy: Any, **arguments: Any) -> L.LightningModule:
    L.seed_everything(6, verbose=False)
    module = make()
    trainer = L.Trainer(
        **{"max_epochs": 2, **arguments},
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, *([] if data is None else [data]))
    return module


def check(
    make: Callable[[], L.LightningModule],
    data: Any = None,
    *,
    path: str | None = None,
    tolerance: float = 1e-6,
    in_flight: tuple[int, ...] = (1, 4),
    **arguments: Any,
) -> None:
    """One batch in flight equals plain training; four of them train every stage."""
    plain = run(make, data, "auto", **arguments)
    L.seed_everything(6, verbose=False)
    start = make().state_dict()
    for depth in in_flight:
        strategy = AccEPTStrategy(
            MemoryCluster(2, build_stage).workers,
            module=path,
            in_flight=depth,
            forward_codec="raw",
            backward_codec="raw",
        )
        ours = run(make, data, strategy, **arguments)
        if depth == 1:
            torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=tolerance, atol=tolerance)
            continue
        for name, parameter in ours.named_parameters():
            changed = not torch.equal(dict(plain.named_parameters())[name], start[name])
            assert torch.isfinite(parameter).all(), name
            assert torch.equal(parameter.detach(), start[name]) != changed, name


# ----- Lightning's own


class Boring(BoringModel):
    """BoringModel has one layer; three stages need three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8), nn.Linear(8, 2))  # type: ignore[assignment]


def test_boring_model() -> None:
    check(Boring, limit_train_batches=6)


@pytest.mark.parametrize("make", [BoringModel, DemoModel])
def test_a_model_of_one_layer_says_that_it_is_too_small(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"has 1 layers .* too few for 1 workers and the central node"):
        run(make, DataLoader(RandomDataset(32, 16), 4), AccEPTStrategy(MemoryCluster(1, build_stage).workers))


def test_manual_boring_model() -> None:
    class ManualBoring(ManualOptimBoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(  # type: ignore[assignment]
                nn.Linear(32, 16), nn.Linear(16, 8), nn.Linear(8, 2)
            )

    check(ManualBoring, in_flight=(1,), limit_train_batches=6)


class Classifier(L.LightningModule):
    """The classifier of every tutorial."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> Any:
        return self.net(*inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, target = batch
        loss = F.cross_entropy(self(*inputs), target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_lightnings_mnist_net() -> None:
    check(lambda: Classifier(Net()), loader((1, 28, 28), classes=10, count=8), max_epochs=1)


@pytest.mark.filterwarnings("ignore:forward assigns tensors to self.*src_mask")
def test_lightnings_transformer_language_model() -> None:
    class Language(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(vocab_size=20, ninp=16, nhead=2, nhid=16, nlayers=1, dropout=0.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, target = batch
            return F.nll_loss(self.model(inputs, target), target.view(-1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    generator = torch.Generator().manual_seed(4)
    words = torch.randint(0, 20, (8, 6), generator=generator)
    check(Language, DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), 4), tolerance=1e-5, max_epochs=1)


# ----- as people publish them


class Autoencoder(L.LightningModule):
    """Lightning's first example."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 28 * 28))

    def forward(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.encoder(x))
        return decoded

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_autoencoder() -> None:
    check(Autoencoder, loader((1, 28, 28), classes=2))


class VAE(Autoencoder):
    """Several outputs, and a random number drawn within the module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 16))
        self.mean, self.log_var = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return {"decoded": self.decoder(z), "mean": mean, "log_var": log_var}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        output = self(x)
        mean, log_var = output["mean"], output["log_var"]
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        return F.mse_loss(output["decoded"], x) + 1e-3 * divergence


def test_variational_autoencoder() -> None:
    check(VAE, loader((1, 28, 28), classes=2))


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12, padding_idx=0)
        self.rnn = nn.GRU(12, 12, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens))
        result: Tensor = self.head(hidden.mean(1))
        return result


def test_text_classifier() -> None:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 30, (12, 4), generator=generator)
    target = torch.randint(0, 3, (12,), generator=generator)
    check(lambda: Classifier(TextClassifier()), DataLoader(TensorDataset(tokens, target), 4))


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips across all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = block(3, 8), block(8, 16), block(16, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge2, self.merge1 = block(32, 16), block(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.merge2(torch.cat([second, self.up2(x)], 1))
        x = self.merge1(torch.cat([first, self.up1(x)], 1))
        result: Tensor = self.head(x)
        return result


def test_unet_with_skips() -> None:
    class Segmentation(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, target = batch
            return F.cross_entropy(self(x), target)

    generator = torch.Generator().manual_seed(4)
    x = torch.randn(8, 3, 16, 16, generator=generator)
    masks = torch.randint(0, 4, (8, 16, 16), generator=generator)
    check(lambda: Segmentation(UNet()), DataLoader(TensorDataset(x, masks), 4), tolerance=1e-5)


class Detector(nn.Module):
    """Boxes and classes from one backbone, and features that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(3, 8), nn.MaxPool2d(2), block(8, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.boxes, self.classes = nn.Linear(32, 4), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Any:
        features = self.backbone(x)
        return self.boxes(features), {"classes": self.classes(features), "features": features}


def test_multi_output_model() -> None:
    class Detection(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, box, target = batch
            boxes, rest = self(x)
            losses = {"box": F.smooth_l1_loss(boxes, box), "class": F.cross_entropy(rest["classes"], target)}
            self.log_dict(losses)
            return {"loss": sum(losses.values()), "features": rest["features"].detach()}

    check(lambda: Detection(Detector()), loader((3, 12, 12), (4,), classes=3), tolerance=1e-5)


class GAN(L.LightningModule):
    """Two optimizers by hand; the generator is pipelined, the discriminator stays on the central node."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        generating, discriminating = self.optimizers()  # type: ignore[misc]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(generating)
        fake = self.generator(torch.randn(len(real), 4))
        loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        generating.zero_grad()
        self.manual_backward(loss)
        generating.step()
        self.untoggle_optimizer(generating)

        self.toggle_optimizer(discriminating)
        seen = self.discriminator(real)
        made = self.discriminator(self.generator(torch.randn(len(real), 4)).detach())
        loss = F.binary_cross_entropy_with_logits(seen, ones) + F.binary_cross_entropy_with_logits(made, zeros)
        discriminating.zero_grad()
        self.manual_backward(loss)
        discriminating.step()
        self.untoggle_optimizer(discriminating)

    def configure_optimizers(self) -> Any:
        betas = (0.5, 0.999)
        return (
            torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=betas),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=betas),
        )


def test_gan() -> None:
    check(GAN, loader((8,)), path="generator", in_flight=(1,))
