"""Layers, cuts and what crosses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accept.graph import Chain, trace


def chain_of(module: nn.Module, *args: Tensor) -> Chain:
    return Chain.from_trace(trace(module, args, {}))


def names(chain: Chain) -> list[str]:
    return [layer.name for layer in chain.layers]


def shapes(chain: Chain, training: bool = True) -> list[list[tuple[int, ...]]]:
    return [[value.shape for value in chain.cut(index, training)] for index in range(len(chain.layers) + 1)]


@pytest.fixture(scope="module")
def mobilenet() -> Chain:
    return chain_of(torchvision.models.mobilenet_v2(num_classes=10), torch.randn(4, 3, 32, 32))


def test_mobilenet_has_twenty_layers(mobilenet: Chain) -> None:
    assert names(mobilenet) == [*(f"features.{index}" for index in range(19)), "classifier"]
    assert all(len(cut) == 1 for cut in shapes(mobilenet))
    assert shapes(mobilenet)[18:] == [[(4, 320, 1, 1)], [(4, 1280, 1, 1)], [(4, 10)]]
    assert shapes(mobilenet, training=False) == shapes(mobilenet)


def test_layers_list_their_tensors_and_flops(mobilenet: Chain) -> None:
    first, last = mobilenet.layers[0], mobilenet.layers[-1]
    assert first.parameters == ("features.0.0.weight", "features.0.1.weight", "features.0.1.bias")
    assert set(first.buffers) == {
        f"features.0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert first.flops == 2 * 4 * 32 * 16 * 16 * 3 * 9
    assert last.parameters == ("classifier.1.weight", "classifier.1.bias")
    assert last.flops == 2 * 4 * 1280 * 10


def test_cut_values_say_what_they_are(mobilenet: Chain) -> None:
    (value,) = mobilenet.cut(1)
    assert value.dtype == torch.float32
    assert value.floating
    assert value.differentiable
    assert value.dynamic == (0,)
    assert value.nbytes == 4 * 4 * 32 * 16 * 16


def test_a_program_of_no_layers_passes_values_through(mobilenet: Chain) -> None:
    program = mobilenet.program(3, 3)
    assert program.layers == []
    assert program.train.nodes == ()
    assert [value.name for value in program.train.inputs] == list(program.train.outputs)
    with pytest.raises(IndexError, match="layers 4 to 3 of 20"):
        mobilenet.program(4, 3)
    with pytest.raises(IndexError, match="layers 0 to 21 of 20"):
        mobilenet.program(0, 21)


def test_resnet_blocks() -> None:
    chain = chain_of(torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32))
    blocks = [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
    assert names(chain) == ["conv1", *blocks, "fc"]


def test_encoder_layers_and_inner_cuts_where_a_layer_is_large() -> None:
    def transformer(layers: int) -> nn.Module:
        return torchvision.models.VisionTransformer(
            image_size=16, patch_size=8, num_layers=layers, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3
        )

    chain = chain_of(transformer(6), torch.randn(2, 3, 16, 16))
    assert names(chain) == ["conv_proj", *(f"encoder.layers.encoder_layer_{i}" for i in range(6)), "heads"]
    chain = chain_of(transformer(2), torch.randn(2, 3, 16, 16))
    halves = [f"encoder.layers.encoder_layer_{i}.{part}" for i in range(2) for part in ("self_attention", "mlp")]
    assert names(chain) == ["conv_proj", *halves, "heads"]


def test_auxiliary_outputs_are_carried_in_train_mode_only() -> None:
    module = torchvision.models.googlenet(num_classes=10, init_weights=False)
    chain = chain_of(module, torch.randn(2, 3, 64, 64))
    assert {"inception3a", "inception4e", "inception5b", "fc"} <= set(names(chain))
    assert shapes(chain)[-1] == [(2, 10)] * 3
    assert shapes(chain)[-2][:2] == [(2, 10)] * 2
    assert all(len(cut) == 1 for cut in shapes(chain, training=False))


def test_a_mask_is_sent_in_its_smallest_form(text_classifier: nn.Module) -> None:
    chain = chain_of(text_classifier, torch.ones(4, 12, dtype=torch.int64))
    assert names(chain) == ["embedding", *(f"encoder.layers.{i}" for i in range(4)), "head"]
    for index in range(1, 5):
        mask, activation = chain.cut(index)
        assert mask.shape == (4, 12)
        assert mask.dtype == torch.bool
        assert not mask.differentiable
        assert activation.shape == (4, 12, 32)


def test_skips_cross_the_cuts_of_a_u_net(unet: nn.Module) -> None:
    chain = chain_of(unet, torch.randn(2, 3, 16, 16))
    counts = [len(cut) for cut in shapes(chain)]
    assert max(counts) == 4
    assert counts[0] == counts[-1] == 1
    assert len(chain.layers) >= 10


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.middle(self.embedding(x))))


def test_modules_that_share_a_parameter_are_one_layer() -> None:
    module = Tied()
    traced = trace(module, (torch.zeros(2, 3, dtype=torch.int64),), {})
    assert list(traced.parameters) == ["embedding.weight", "middle.weight", "middle.bias"]
    assert names(Chain.from_trace(traced)) == ["embedding"]


class Accumulates(nn.Module):
    """An in-place sum on a value made four layers earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        total = torch.tanh(self.layers[0](x)) * 1
        y = self.layers[2](self.layers[1](total.exp()))
        total += y
        return self.layers[5](self.layers[4](self.layers[3](total)))


def test_no_cut_between_a_value_and_what_overwrites_it(pipeline: Any) -> None:
    module, x = Accumulates(), torch.randn(4, 4)
    chain = chain_of(module, x)
    # The layer named layers.1 holds the product, layers.1, layers.2 and the sum.
    assert names(chain) == ["layers.0", "layers.1", "layers.3", "layers.4", "layers.5"]
    expected = module(x)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    stages = pipeline(module, (x,), count=4)
    output = stages.forward((x,), {}, True)
    output.sum().backward()
    stages.backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True))


class OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 8))
        self.second = nn.Parameter(torch.randn(8, 8))
        self.third = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x @ self.first) @ self.second) @ self.third


def test_products_with_a_modules_own_parameters_are_named_after_them() -> None:
    assert names(chain_of(OwnParameters(), torch.randn(2, 4))) == ["first", "second", "third"]


def test_a_module_without_parameters_is_one_layer(pipeline: Any) -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).relu()

    x = torch.randn(2, 4, requires_grad=True)
    stages = pipeline(Doubles(), (x,))
    assert names(stages.chain) == ["forward"]
    assert torch.equal(stages.forward((x,), {}, True), (x * 2).relu())


class Repeated(nn.Module):
    """One block without parameters of its own, called between layers again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.mix(layer(x))
        return x


class Mix(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.T, -1) @ x


def test_names_are_unique() -> None:
    found = names(chain_of(Repeated(), torch.randn(2, 4)))
    assert len(set(found)) == len(found)
    assert {"layers.0", "layers.1", "layers.2"} <= set(found)


class Lengthened(nn.Module):
    """Sizes that later layers need: the length with one token more, and arithmetic on it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = torch.cat([self.token.expand(batch, -1, -1), self.first(x)], 1)
        x = self.second(x)
        x = self.third(x + torch.ones(batch, length + 1, width) / length)
        return x.reshape(batch * (length + 1), width)


def test_sizes_are_told_from_what_crosses_a_cut(pipeline: Any, stages: Any) -> None:
    module = Lengthened()
    first = trace(module, (torch.randn(3, 5, 8),), {})
    again = trace(module, (torch.randn(3, 6, 8),), {}, first)
    built = stages(again, 3)
    assert names(built.chain) == ["first", "second", "third"]
    for batch, length in ((3, 6), (1, 4), (5, 9)):
        x = torch.randn(batch, length, 8)
        assert again.accepts((x,), {})
        assert torch.equal(built.forward((x,), {}, True), module(x))


def test_memory_of_layers(mobilenet: Chain) -> None:
    first, last = mobilenet.layers[0], mobilenet.layers[-1]
    assert first.weight_bytes == 4 * (32 * 3 * 9 + 2 * 32)
    # The convolution's and BatchNorm's results; ReLU6 overwrites the latter.
    assert first.activation_bytes == 2 * 4 * 4 * 32 * 16 * 16
    assert last.weight_bytes == 4 * (1280 * 10 + 10)


@pytest.mark.parametrize(("frozen", "expected"), [(False, True), (True, False)])
def test_batch_dependence_is_that_of_batch_norm_in_train_mode(frozen: bool, expected: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    if frozen:
        net[1].eval()
    assert chain_of(net, torch.randn(3, 4)).batch_dependent is expected
    assert not chain_of(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4)).batch_dependent
