"""Every torchvision classification model: traced, cut into layers, trained for two steps through three stages."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_accept.graph import Chain, StageModule, StageProgram, TraceError, trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUIRED = {
    "resnet18",
    "mobilenet_v2",
    "vit_b_16",
    "convnext_tiny",
    "densenet121",
    "googlenet",
    "swin_t",
    "efficientnet_b0",
}
NAMES = torchvision.models.list_models(module=torchvision.models)
STEPS = 2
STAGES = 3

outcome: dict[str, str] = {}


def build(name: str) -> tuple[nn.Module, int]:
    """The model, small where it allows that, and the side of its input."""
    if name.startswith("vit"):
        size = 56 if name == "vit_h_14" else 64
        return torchvision.models.get_model(name, num_classes=10, image_size=size), size
    if name == "inception_v3":
        return torchvision.models.get_model(name, num_classes=10, init_weights=False), 299
    if name == "googlenet":
        return torchvision.models.get_model(name, num_classes=10, init_weights=False), 64
    if name == "maxvit_t":
        return torchvision.models.get_model(name, num_classes=10, input_size=(224, 224)), 224
    return torchvision.models.get_model(name, num_classes=10), 64


def loss_of(output: Any) -> Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return sum((tensor.square().mean() for tensor in tensors), torch.zeros(()))


def draws_random_numbers(module: nn.Module) -> bool:
    return any(
        isinstance(child, nn.Dropout | torchvision.ops.StochasticDepth) and child.p > 0 for child in module.modules()
    )


@pytest.fixture(scope="module", autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for heading, good in (("exported", True), ("not exported", False)):
            names = [name for name, text in outcome.items() if (text == "") == good]
            print(f"\n{heading} ({len(names)}): {', '.join(names)}")
        for name, text in outcome.items():
            if text:
                print(f"{name}: {text}")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_trains_through_three_stages(name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, size = build(name)
    module.train()
    reference = copy.deepcopy(module)
    images = torch.randn(2, 3, size, size)
    try:
        traced = trace(module, (images,), {})
    except TraceError as error:
        outcome[name] = str(error)
        assert name not in REQUIRED, str(error)
        pytest.skip(f"does not export: {error}")
    chain = Chain.from_trace(traced)
    count = len(chain.layers)
    assert count >= 4
    assert len({layer.name for layer in chain.layers}) == count
    edges = [round(index * count / STAGES) for index in range(STAGES + 1)]
    stages = []
    for first, last in itertools.pairwise(edges):
        program = chain.program(first, last)
        program = StageProgram.from_json(program.to_json(), program.constants)
        stages.append(StageModule(program, traced.parameters, traced.buffers, program.constants, torch.device("cpu")))

    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (reference, module)]
    random = draws_random_numbers(module)
    for step in range(STEPS):
        torch.manual_seed(step)
        expected = loss_of(reference(images))
        optimizers[0].zero_grad()
        expected.backward()
        optimizers[0].step()

        torch.manual_seed(step)
        values, tape = [images], []
        for stage in stages:
            received = [value.detach() for value in values]
            for value, info in zip(received, stage.program.train.inputs, strict=True):
                value.requires_grad_(info.differentiable and bool(tape))
            values = stage.run(received, training=True)
            tape.append((received, values))
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in values]
        loss = loss_of(traced.unflatten(leaves, training=True))
        optimizers[1].zero_grad()
        loss.backward()
        gradients = [leaf.grad for leaf in leaves]
        for received, produced in reversed(tape):
            pairs = [(value, grad) for value, grad in zip(produced, gradients, strict=True) if grad is not None]
            torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
            gradients = [value.grad for value in received]
        optimizers[1].step()

        assert torch.isfinite(loss)
        if not random:
            assert torch.equal(loss, expected)
    if not random:
        for (key, ours), theirs in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), key
    outcome[name] = ""
