"""Tracing leaves no trace: the module, the generators and the context stay as they were; what varies is dynamic."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_accept.graph import Chain, TraceError, trace


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def training_arguments(traced: Any, mode: bool) -> list[bool]:
    return [node.args[5] for node in traced.graphs[mode].nodes if node.op == "aten.batch_norm.default"]


def test_module_and_generators_are_left_alone() -> None:
    module = small()
    module[0].weight.requires_grad_(False)
    parameters = dict(module.named_parameters())
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(4, 4)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    attributes = set(module.__dict__)

    traced = trace(module, (x,), {})

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert not module[0].weight.requires_grad
    assert set(module.__dict__) == attributes
    assert all(module.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(child.training for child in module.modules())
    assert traced.parameters == parameters
    assert traced.buffers["1.running_mean"] is module[1].running_mean


def test_works_whatever_the_caller_runs_under() -> None:
    module = small()
    with torch.inference_mode():
        x = torch.randn(4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            traced = trace(module, (x,), {})
    assert training_arguments(traced, True) == [True]
    assert training_arguments(traced, False) == [False]
    assert all(node.autocast is None for node in traced.graphs[True].nodes)
    with torch.no_grad():
        assert all(node.grad is None for node in trace(module, (torch.randn(4, 4),), {}).graphs[True].nodes)


def test_a_frozen_batch_norm_stays_frozen() -> None:
    module = small()
    module[1].eval()
    x = torch.randn(4, 4)
    traced = trace(module, (x,), {})
    assert training_arguments(traced, True) == [False]
    assert not module[1].training
    assert module[2].training

    module[1].train()
    assert not traced.accepts((x,), {})
    assert "flags" in traced.describe_mismatch((x,), {})
    assert training_arguments(trace(module, (x,), {}, traced), True) == [True]


def test_any_batch_size_is_accepted_even_when_traced_on_one() -> None:
    for batch in (1, 4):
        traced = trace(small(), (torch.randn(batch, 4),), {})
        assert traced.accepts((torch.randn(1, 4),), {})
        assert traced.accepts((torch.randn(7, 4),), {})
        assert traced.describe_mismatch((torch.randn(7, 4),), {}) == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.randn(4, 5),), "size 4 in dimension 1 and now has 5"),
        ((torch.randn(4, 4).double(),), "torch.float64"),
        ((torch.randn(4, 4, 1),), "3"),
        ((torch.randn(4, 4), 1), "nest differently"),
    ],
)
def test_other_inputs_are_described(args: tuple[Any, ...], words: str) -> None:
    traced = trace(nn.Linear(4, 2), (torch.randn(4, 4),), {})
    assert not traced.accepts(args, {})
    assert words in traced.describe_mismatch(args, {})


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        x = self.layer(x) * scale
        return x if shift is None else x + shift


def test_values_that_are_not_tensors_are_part_of_the_trace() -> None:
    x = torch.randn(4, 4)
    traced = trace(Scaled(), (x, 2.0), {"shift": None})
    assert traced.accepts((x, 2.0), {"shift": None})
    assert not traced.accepts((x, 3.0), {"shift": None})
    assert "2.0" in traced.describe_mismatch((x, 3.0), {"shift": None})
    assert not traced.accepts((x, 2.0), {"shift": x})


def test_a_dimension_seen_with_another_size_becomes_dynamic(text_classifier: nn.Module) -> None:
    first = trace(text_classifier, (torch.ones(4, 12, dtype=torch.int64),), {})
    assert not first.accepts((torch.ones(4, 9, dtype=torch.int64),), {})
    second = trace(text_classifier, (torch.ones(4, 9, dtype=torch.int64),), {}, first)
    assert second.dynamic == [{0, 1}]
    for batch, length in ((1, 5), (6, 12)):
        assert second.accepts((torch.ones(batch, length, dtype=torch.int64),), {})
    third = trace(text_classifier, (torch.ones(2, 1, dtype=torch.int64),), {}, second)
    assert third.dynamic == [{0, 1}]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.shape[0] > 5 else self.a(self.b(x))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.ones(len(list(range(x.shape[0]))), 4))


@pytest.mark.parametrize("build", [Branch, Counted])
def test_a_module_that_depends_on_the_batch_size_is_traced_again(build: Callable[[], nn.Module], pipeline: Any) -> None:
    module = build()
    for batch in (4, 7, 1):
        x = torch.randn(batch, 4)
        stages = pipeline(module, (x,), count=2)
        assert torch.equal(stages.forward((x,), {}, True), module(x))
        assert stages.trace.accepts((x,), {})
        assert not stages.trace.accepts((torch.randn({4: 7, 7: 4, 1: 9}[batch], 4),), {})


def test_sizes_that_must_agree_are_compared() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 + y

    traced = trace(Sum(), (torch.randn(4, 3), torch.randn(4, 3)), {})
    assert traced.accepts((torch.randn(5, 3), torch.randn(5, 3)), {})
    assert not traced.accepts((torch.randn(5, 3), torch.randn(4, 3)), {})


def test_an_input_of_one_row_beside_a_batch_is_no_batch(pipeline: Any) -> None:
    module = Scaled()
    x, shift = torch.randn(4, 4), torch.randn(1, 4)
    stages = pipeline(module, (x,), {"shift": shift}, count=1)
    x = torch.randn(6, 4)
    assert stages.trace.accepts((x,), {"shift": shift})
    assert torch.equal(stages.forward((x,), {"shift": shift}, True), module(x, shift=shift))


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    value: Tensor
    label: str


@dataclasses.dataclass
class Unknown:
    value: Tensor


torch.export.register_dataclass(Output)


class Returns(nn.Module):
    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        hidden = self.a(x)
        return self.shape(hidden, self.b(hidden))


def test_output_structures(pipeline: Any) -> None:
    x = torch.randn(4, 4)
    output = pipeline(Returns(lambda h, o: Pair(o, [h, o, None, 3.5])), (x,)).forward((x,), {}, True)
    assert isinstance(output, Pair)
    assert output.second[1] is output.first
    assert output.second[2:] == [None, 3.5]
    output = pipeline(Returns(lambda h, o: Output(o, "name")), (x,)).forward((x,), {}, True)
    assert isinstance(output, Output)
    assert output.label == "name"
    x = torch.randn(6, 4)
    output = pipeline(Returns(lambda h, o: (o, o.shape[0], o.numel() / 2)), (torch.randn(4, 4),)).forward(
        (x,), {}, False
    )
    assert output[1:] == (6, 12.0)


def test_unknown_structures_are_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(TraceError, match=r"returns a .*Unknown.*register_dataclass"):
        trace(Returns(lambda h, o: Unknown(o)), (x,), {})
    with pytest.raises(TraceError, match="returns no tensor"):
        trace(Returns(lambda h, o: 3), (x,), {})
    with pytest.raises(TraceError, match=r"argument 0 of forward is a .*Unknown.*register_dataclass"):
        trace(nn.Linear(4, 4), (Unknown(x),), {})
    with pytest.raises(TraceError, match=r"keyword argument 'input'.* layout"):
        trace(nn.Linear(4, 4), (), {"input": x.to_sparse()})
    with pytest.raises(TraceError, match="without a tensor"):
        trace(nn.Linear(4, 4), (3,), {})
    with pytest.raises(TraceError, match="batch is empty"):
        trace(nn.Linear(4, 4), (torch.zeros(0, 4),), {})


class Classifier(L.LightningModule):
    """A LightningModule that is traced while a Trainer drives it, in the sanity check and in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.accuracy = MulticlassAccuracy(2)
        self.unused = nn.Linear(3, 3)
        self.names: list[list[str]] = []

    @property
    def touchy(self) -> int:
        raise RuntimeError("not yet")

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.net(x) * scale}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.follow(batch[0])
        assert self.training
        return self(batch[0])["logits"].sum()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.follow(batch[0])
        assert not self.training

    def follow(self, x: Tensor) -> None:
        traced = trace(self, (x,), {"scale": 2.0})
        self.names.append([layer.name for layer in Chain.from_trace(traced).layers])
        assert list(traced.parameters) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_attached_to_a_trainer() -> None:
    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    module = Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, loader)
    assert module.names
    assert all(names == ["net.0", "net.2"] for names in module.names)
