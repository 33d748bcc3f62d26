"""Models to trace, and a pipeline of stages without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_accept.graph import Chain, StageModule, StageProgram, Trace, trace

Call = tuple[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class TextClassifier(nn.Module):
    """Token ids, padding with 0, and a mask that every layer uses."""

    def __init__(self, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 20, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens == 0
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        x = self.encoder(x, src_key_padding_mask=mask)
        keep = (~mask).unsqueeze(-1).float()
        return self.head((x * keep).sum(1) / keep.sum(1))


class Conv1d(nn.Module):
    """A 1-D CNN with functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm1d(8)
        self.conv2 = nn.Conv1d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm1d(8)
        self.fc1 = nn.Linear(64, 16)
        self.fc2 = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool1d(F.relu(self.norm2(self.conv2(x)), inplace=True), 2)
        return self.fc2(F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training))


class UNet(nn.Module):
    """Skips from each level down to its level up."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        width = [8 * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList([self.double(width[i - 1] if i else 3, width[i]) for i in range(depth)])
        self.middle = self.double(width[depth - 1], width[depth])
        levels = list(reversed(range(depth)))
        self.up = nn.ModuleList([nn.ConvTranspose2d(width[i + 1], width[i], 2, 2) for i in levels])
        self.merge = nn.ModuleList([self.double(2 * width[i], width[i]) for i in levels])
        self.out = nn.Conv2d(width[0], 2, 1)

    @staticmethod
    def double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.out(x)


class TiedNeighbours(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.first(self.embedding(tokens)))
        return self.head(F.relu(self.third(F.relu(self.second(x)))))


class Frozen(nn.Module):
    """Frozen and unused parameters, keyword inputs, and an output with everything in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 3)
        self.unused = nn.Linear(3, 3)
        self.a.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.b(F.relu(self.a(x))))
        output = self.d(self.c(hidden * scale) + shift)
        return {
            "output": output,
            "nest": (hidden, None, "tag", 3),
            "twice": [output, output],
            "batch": x.shape[0],
            "input": x,
            "bias": self.d.bias,
        }


class Stateful(nn.Module):
    """Buffers assigned and overwritten, constants, in-place slices, and regions without gradient and with autocast."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4), persistent=False)
        self.offset = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.layers[1](x - self.mean)
        self.count.mul_(2).add_(1)
        side = torch.zeros_like(x)
        side[:, 1:] = x[:, 1:] * 2
        with torch.no_grad():
            scale = x.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[2](x)
        limit = torch.tensor([1.0, float("inf"), 2.0, 3.0]).clamp(max=5)
        return self.layers[3](x.float() / scale) + side + self.offset + limit


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        return self.head(x[:, -1])


def tokens(batch: int, length: int) -> Tensor:
    ids = torch.randint(1, 100, (batch, length))
    ids[0, 7:] = 0
    return ids


def images(*batches: int, size: int = 32) -> list[Call]:
    return [((torch.randn(batch, 3, size, size),), {}) for batch in batches]


def vision_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=6, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )


CASES: dict[str, Callable[[], tuple[nn.Module, list[Call]]]] = {
    "mobilenet_v2": lambda: (torchvision.models.mobilenet_v2(num_classes=10), images(4, 3)),
    "resnet18": lambda: (torchvision.models.resnet18(num_classes=10), images(4, 3)),
    "vision_transformer": lambda: (vision_transformer(), images(4, 1)),
    "googlenet": lambda: (torchvision.models.googlenet(num_classes=10, init_weights=False), images(4, 3, size=64)),
    "text": lambda: (TextClassifier(), [((tokens(b, n),), {}) for b, n in ((4, 12), (3, 12), (4, 15), (1, 9))]),
    "conv1d": lambda: (Conv1d(), [((torch.randn(b, 3, 32),), {}) for b in (4, 1)]),
    "unet": lambda: (UNet(), images(4, 3, size=16)),
    "tied": lambda: (TiedNeighbours(), [((torch.randint(0, 50, (4, 6)),), {})]),
    "frozen": lambda: (
        Frozen(),
        [((torch.randn(b, 4),), {"scale": 2.0, "shift": torch.randn(b, 8)}) for b in (4, 1)],
    ),
    "stateful": lambda: (Stateful(), [((torch.randn(b, 4),), {}) for b in (4, 3)]),
    "recurrent": lambda: (Recurrent(), [((torch.randn(b, 7, 4),), {}) for b in (4, 1)]),
}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, list[Call]]:
    """The model and calls named by the parameter."""
    return CASES[request.param]()


class Stages:
    """A traced module in stages that hand tensors to each other, every program having gone through JSON."""

    def __init__(self, traced: Trace, count: int) -> None:
        self.trace = traced
        self.chain = Chain.from_trace(traced)
        layers = len(self.chain.layers)
        count = min(count, layers)
        edges = [round(index * layers / count) for index in range(count + 1)]
        self.modules: list[StageModule] = []
        for first, last in pairwise(edges):
            program = self.chain.program(first, last)
            program = StageProgram.from_json(program.to_json(), program.constants)
            self.modules.append(
                StageModule(program, traced.parameters, traced.buffers, program.constants, torch.device("cpu"))
            )
        self.tape: list[tuple[list[Tensor], list[Tensor]]] = []
        self.leaves: list[Tensor] = []

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        """Run all stages; the output's tensors are leaves, as on the central node."""
        values = self.trace.flatten(args, kwargs)
        self.tape = []
        for position, stage in enumerate(self.modules):
            if position > 0:
                infos = stage.program.mode(training).inputs
                values = [
                    value.detach().clone().requires_grad_(training and info.differentiable)
                    for value, info in zip(values, infos, strict=True)
                ]
            received = values
            values = stage.run(received, training)
            self.tape.append((received, values))
        self.leaves = [value.detach().requires_grad_(training and value.requires_grad) for value in values]
        return self.trace.unflatten(self.leaves, training)

    def backward(self) -> None:
        """Send the leaves' gradients back through all stages."""
        gradients = [leaf.grad for leaf in self.leaves]
        for received, produced in reversed(self.tape):
            pairs = [
                (value, gradient)
                for value, gradient in zip(produced, gradients, strict=True)
                if gradient is not None and value.requires_grad
            ]
            if pairs:
                torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
            gradients = [value.grad if value.is_leaf else None for value in received]


@pytest.fixture
def pipeline() -> Callable[..., Stages]:
    """Build stages from a module (or a trace) and a call."""

    def build(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None, count: int = 3) -> Stages:
        return Stages(trace(module, tuple(args), kwargs or {}), count)

    return build


@pytest.fixture
def stages() -> type[Stages]:
    return Stages


@pytest.fixture
def weighted_loss() -> Callable[[Any], Tensor]:
    """A loss in which every element of every output has a gradient of its own."""

    def loss(output: Any) -> Tensor:
        floats = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return sum(
            ((leaf.float() * torch.linspace(0.5, 1.5, leaf.numel()).view(leaf.shape)).sum() for leaf in floats),
            torch.zeros(()),
        )

    return loss


@pytest.fixture
def text_classifier() -> nn.Module:
    return TextClassifier()


@pytest.fixture
def unet() -> nn.Module:
    return UNet()
