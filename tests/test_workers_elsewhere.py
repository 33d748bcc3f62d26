"""Trained through workers, a LightningModule of any kind ends where plain Lightning ends, in every entry point."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.memory import MemoryCluster

raw_strategy = partial(AccEPTStrategy, forward_codec="raw", backward_codec="raw")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]

CLASSES = 3


class Model(L.LightningModule):
    """Classifies; writes down what it validates, tests and predicts."""

    def __init__(self, net: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if net is None:
            net = nn.Sequential(
                *(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout)),
                *(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout)),
                nn.Linear(16, CLASSES),
            )
        self.net = net
        self.losses: list[float] = []

    def loss(self, *inputs: Tensor) -> Tensor:
        *inputs, target = inputs  # type: ignore[assignment]
        return nn.functional.cross_entropy(self.net(*inputs), target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(*batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(*batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return dataloader_idx, batch_idx, self.net(*batch[:-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_data(count: int = 22, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


def loader(count: int = 22, seed: int = 0, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(make_data(count, seed), batch_size)


def in_memory(in_flight: Any = 1, workers: int = 2, **options: Any) -> AccEPTStrategy:
    return raw_strategy(MemoryCluster(workers, build_stage).workers, in_flight=in_flight, **options)


def make_trainer(strategy: Any, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", **arguments},
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(make_module: Any, strategy: Any, data: Any = None, validation: Any = None, **arguments: Any) -> Any:
    L.seed_everything(5, verbose=False)
    module = make_module()
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(module, loader() if data is None else data, validation)
    return module, trainer


def assert_same(ours: Any, plain: Any) -> None:
    """Two trained modules and their trainers, to the bit."""
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=0, atol=0)
    assert ours[0].losses == plain[0].losses
    assert len(ours[0].losses) > 2
    assert ours[1].callback_metrics == plain[1].callback_metrics
    states = [[optimizer.state_dict() for optimizer in trainer.optimizers] for _, trainer in (ours, plain)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def equals_plain(make_module: Any, **arguments: Any) -> tuple[Any, Any]:
    """One batch in flight through two workers gives what plain Lightning gives."""
    options = {name: arguments.pop(name) for name in ("module", "partition", "in_flight") if name in arguments}
    plain = train(make_module, "auto", **arguments)
    ours = train(make_module, in_memory(**options), **arguments)
    assert_same(ours, plain)
    return ours


# ----- workers started by hand


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], str]]:
    """URLs and token of two workers, started as on a device."""
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("a-token-for-both\n")
    path.chmod(0o600)
    command = ["worker", "--host", "127.0.0.1", "--port", "0", "--threads", "1", "--device", "cpu", "--token-file"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_accept.cli", *command, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]
    try:
        urls = []
        for process in processes:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("give this address"))
            urls.append(line.strip().rsplit(" ", 1)[1])
        yield urls, "a-token-for-both"
        for process in processes:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_workers_started_by_hand_train_the_same_to_the_bit(workers: tuple[list[str], str]) -> None:
    urls, token = workers
    plain = train(lambda: Model(dropout=0.2), "auto", validation=loader(9, 1))
    ours = train(lambda: Model(dropout=0.2), raw_strategy(urls, token=token, in_flight=1), validation=loader(9, 1))
    assert_same(ours, plain)


def test_one_trainer_fits_tests_and_fits_again(workers: tuple[list[str], str]) -> None:
    urls, token = workers

    def run(strategy: Any) -> Any:
        module, trainer = train(Model, strategy, max_epochs=1)
        first = trainer.test(module, loader(9, 1), verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader())
        second = trainer.test(module, loader(9, 1), verbose=False)
        return (module, trainer), first, second

    plain, ours = run("auto"), run(raw_strategy(urls, token=token, in_flight=1))
    assert_same(ours[0], plain[0])
    assert ours[1:] == plain[1:]
    assert ours[1] != ours[2]


def test_four_in_flight_through_workers_elsewhere_equal_those_in_memory(workers: tuple[list[str], str]) -> None:
    urls, token = workers
    # Workers at URLs are measured by default, and how stale the weights are follows from the figures.
    over_http = train(lambda: Model(dropout=0.2), raw_strategy(urls, token=token, in_flight=4, latency="flops"))
    assert_same(over_http, train(lambda: Model(dropout=0.2), in_memory(4)))


# ----- validate, test, predict


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("entry", ["validate", "test"])
def test_validate_and_test_equal_plain_lightning(entry: str, in_flight: int) -> None:
    loaders = [loader(9, 1), loader(30, 2), loader(1, 3)]
    module, _ = train(Model, "auto")
    expected = getattr(make_trainer("auto"), entry)(module, loaders, verbose=False)
    assert getattr(make_trainer(in_memory(in_flight)), entry)(module, loaders, verbose=False) == expected
    assert len(expected) == 3


@pytest.mark.parametrize("limit", [1.0, 3])
def test_predictions_come_in_order_and_equal_plain_lightnings(limit: Any) -> None:
    loaders = [loader(9, 1), loader(30, 2)]
    module, _ = train(Model, "auto")
    expected: Any = make_trainer("auto", limit_predict_batches=limit).predict(module, loaders)
    actual: Any = make_trainer(in_memory(), limit_predict_batches=limit).predict(module, loaders)
    assert [[item[:2] for item in part] for part in actual] == [[item[:2] for item in part] for part in expected]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_several_validation_loaders_while_training_equal_plain() -> None:
    ours = equals_plain(Model, validation=[loader(9, 1), loader(30, 2)], val_check_interval=3)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(ours[1].callback_metrics)


def test_evaluation_steps_without_the_pipelined_call_and_with_two() -> None:
    class Odd(Model):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            calls = batch_idx % 3
            self.log("calls", float(sum(self.net(batch[0]).sum() for _ in range(calls))))

    module, _ = train(Odd, "auto")
    results = [make_trainer(s).test(module, loader(30, 2), verbose=False) for s in ("auto", in_memory(4))]
    assert results[0] == results[1]


# ----- every kind of LightningModule


def test_a_module_that_defines_forward_itself() -> None:
    class WithForward(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * 0.5  # type: ignore[no-any-return]

        def loss(self, *inputs: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self(inputs[0]), inputs[1])

    equals_plain(WithForward, validation=loader(9, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 12, bias=False)
        self.last.weight = self.embed.weight
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 5).long().clamp(0, 11)
        h = self.norm(self.again(torch.tanh(self.first(self.embed(tokens).mean(1)))))
        result: Tensor = self.head(torch.tanh(self.last(h)))
        return result


def test_shared_and_tied_parameters() -> None:
    plain = train(lambda: Model(Tied()), "auto")
    ours = train(lambda: Model(Tied()), in_memory(workers=1))
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=1e-5, atol=1e-6)
    assert ours[0].net.last.weight is ours[0].net.embed.weight
    assert ours[0].net.first is ours[0].net.again


class Rich(nn.Module):
    """Takes positional and keyword inputs, returns a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(4, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)
        self.other = nn.Linear(8, 1)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor, twice: bool = False) -> dict[str, Any]:
        h = self.middle(torch.tanh(self.left(pair[0]) + self.right(pair[1]) * scale))
        return {"logits": self.head(h) * (2 if twice else 1), "extra": (self.other(h), h.argmax(1))}


class RichModel(Model):
    def __init__(self) -> None:
        super().__init__(Rich())

    def loss(self, *inputs: Tensor) -> Tensor:
        x, target = inputs
        output = self.net((x, x.flip(1)), scale=x.abs().mean(1, keepdim=True), twice=True)
        assert output["extra"][1].dtype == torch.int64
        return nn.functional.cross_entropy(output["logits"], target) + output["extra"][0].square().mean()


def test_several_inputs_keywords_and_nested_outputs() -> None:
    equals_plain(RichModel, validation=loader(9, 1))


def test_several_inputs_keywords_and_nested_outputs_in_flight() -> None:
    plain = train(RichModel, "auto")
    ours = train(RichModel, in_memory(4, micro_batches=2, sync_warmup_steps=99))
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=1e-5, atol=1e-6)
    assert len(train(RichModel, in_memory(4, micro_batches=2))[0].losses) == len(plain[0].losses)


class Tempered(Model):
    """Learns a temperature and a shift outside the pipelined module."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(CLASSES))

    def loss(self, *inputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(inputs[0]) * self.temperature + self.shift, inputs[1])


def test_parameters_outside_the_pipelined_module() -> None:
    equals_plain(Tempered)


def test_parameters_outside_the_pipelined_module_train_in_flight() -> None:
    module, _ = train(Tempered, in_memory(4, sync_warmup_steps=99))
    plain, _ = train(Tempered, "auto")
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    module, _ = train(Tempered, in_memory(4))
    assert module.temperature != 1
    assert module.shift.abs().min() > 0


def test_inputs_that_require_grad_get_their_gradient() -> None:
    class Before(Model):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(4, 4)

        def loss(self, *inputs: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.net(torch.tanh(self.before(inputs[0]))), inputs[1])

    equals_plain(Before, module="net")


def test_several_pipelined_calls_in_one_step() -> None:
    class Siamese(Model):
        def loss(self, *inputs: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.net(inputs[0]), self.net(inputs[0].flip(0))) + super().loss(*inputs)

    net = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    plain = train(lambda: Siamese(nn.Sequential(*[type(n)(*_size(n)) for n in net])), "auto")
    ours = train(lambda: Siamese(nn.Sequential(*[type(n)(*_size(n)) for n in net])), in_memory())
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=1e-5, atol=1e-6)


def _size(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()


def test_dropout_draws_what_plain_training_draws() -> None:
    equals_plain(lambda: Model(dropout=0.4), validation=loader(9, 1))


# ----- data


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


LENGTHS = [7, 7, 5, 9, 1, 7, 12, 5]


def sentences() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 20, (3, length), generator=generator), torch.randint(0, CLASSES, (3,), generator=generator))
        for length in LENGTHS
    ]


def text_loader() -> DataLoader[Any]:
    return DataLoader(sentences(), batch_size=None)  # type: ignore[arg-type]


def test_a_sequence_length_that_varies_between_batches() -> None:
    equals_plain(lambda: Model(Text()), data=text_loader(), validation=text_loader())


def test_a_sequence_length_that_varies_between_batches_in_flight() -> None:
    module, trainer = train(lambda: Model(Text()), in_memory(4), data=text_loader(), validation=text_loader())
    assert len(module.losses) == trainer.global_step == 2 * len(LENGTHS)
    warm, _ = train(lambda: Model(Text()), in_memory(4, sync_warmup_steps=99), data=text_loader(), max_epochs=1)
    plain, _ = train(lambda: Model(Text()), "auto", data=text_loader(), max_epochs=1)
    torch.testing.assert_close(warm.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_several_training_loaders_at_once(mode: Any, in_flight: int) -> None:
    from lightning.pytorch.utilities import CombinedLoader

    class Combined(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = [part for part in batch.values() if part is not None]
            return super().training_step([torch.cat(column) for column in zip(*parts, strict=True)], batch_idx)

    def data() -> Any:
        return CombinedLoader({"a": loader(22, 0), "b": loader(9, 1)}, mode)

    plain = train(Combined, "auto", data=data())
    ours = train(Combined, in_memory(in_flight), data=data())
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=1e-5, atol=1e-6)
    assert len(ours[0].losses) == len(plain[0].losses)


# ----- manual optimization


class Manual(Model):
    """Two optimizers, the second one accumulates over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = self.loss(*batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.9), torch.optim.AdamW(parameters[1::2], lr=0.01)]


@pytest.mark.parametrize("in_flight", ["auto", 1])
def test_manual_optimization(in_flight: Any) -> None:
    equals_plain(Manual, in_flight=in_flight)


def test_gradients_that_are_never_zeroed_add_up() -> None:
    class Adding(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            loss = self.loss(*batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            first.step()
            second.step()

    equals_plain(Adding)


# ----- the end of the trainer


FITS = """
import sys, lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_accept import AccEPTStrategy
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            print(*self.trainer.strategy._local.pids, flush=True)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = L.Trainer(strategy=AccEPTStrategy(2), accelerator="cpu", max_epochs=-1, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(100000, 4)), 4))
"""


def ended(pid: int, seconds: float = 30.0) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits on process ids as only Linux can")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_embedded_workers_end_with_the_trainer(number: signal.Signals, tmp_path: Path) -> None:
    process: Any = subprocess.Popen(
        [sys.executable, "-c", FITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(number)
        process.wait(60)
        assert all(ended(pid) for pid in pids)
    finally:
        process.kill()
        process.communicate()
