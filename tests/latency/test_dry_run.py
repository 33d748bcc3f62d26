"""Shapes, dtypes and memory without computing anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_accept.graph import Chain, trace
from lightning_accept.latency.dry_run import dry_run, needs_grad


def parts(module: nn.Module, *inputs: Tensor) -> tuple[list, list]:  # type: ignore[type-arg]
    chain = Chain.from_trace(trace(module, inputs, {}))
    count = len(chain.layers)
    return [chain.program(i, i + 1) for i in range(count)], [chain.cut(i) for i in range(count + 1)]


def test_finds_what_was_traced(convolutions: nn.Module, images: Tensor) -> None:
    layers, cuts = parts(convolutions, images)
    assert dry_run(layers, cuts).cuts == tuple(map(tuple, cuts))


def test_another_batch_size(convolutions: nn.Module, images: Tensor) -> None:
    layers, cuts = parts(convolutions, images)
    cuts[0] = [replace(cuts[0][0], shape=(7, 3, 6, 6))]
    found = dry_run(layers, cuts)
    assert [cut[0].shape for cut in found.cuts] == [(7, 3, 6, 6), (7, 8, 6, 6), (7, 8, 6, 6), (7, 16), (7, 4)]


def test_a_batch_that_lies_elsewhere_than_in_front() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.transpose(0, 1)).relu().flatten(0, 1))

    layers, cuts = parts(SequenceFirst(), torch.randn(4, 3, 5))
    cuts[0] = [replace(cuts[0][0], shape=(6, 3, 5))]
    assert dry_run(layers, cuts).cuts[-1][0].shape == (18, 2)


def test_dtypes_under_autocast() -> None:
    layers, cuts = parts(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4))
    found = dry_run(layers, cuts, autocast="bfloat16")
    assert [cut[0].dtype for cut in found.cuts][:3] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_memory_of_linear_layers() -> None:
    layers, cuts = parts(
        nn.Sequential(nn.Linear(10, 20), nn.Sequential(nn.ReLU(), nn.Linear(20, 5))), torch.randn(8, 10)
    )
    found = dry_run(layers, cuts)
    weights = [2 * 4 * (10 * 20 + 20), 2 * 4 * (20 * 5 + 5)]
    # The first keeps its input, the second what its ReLU gives, once though two operations need it.
    assert list(found.layer_bytes) == [weights[0] + 4 * 8 * 10, weights[1] + 4 * 8 * 20]


def test_frozen_parameters_need_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    module[0].requires_grad_(False)
    layers, cuts = parts(module, torch.randn(8, 10))
    assert dry_run(layers, cuts).layer_bytes[0] == 4 * (10 * 20 + 20)


def test_nothing_is_disturbed(convolutions: nn.Module, images: Tensor, make_request: Callable[..., object]) -> None:
    before = {name: tensor.clone() for name, tensor in convolutions.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        make_request(convolutions, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in convolutions.state_dict().items())


def test_the_models_own_input_takes_no_gradient(convolutions: nn.Module, images: Tensor) -> None:
    _, cuts = parts(convolutions, images)
    assert not needs_grad(cuts[0][0], 0)
    assert needs_grad(cuts[1][0], 1)
    assert not needs_grad(replace(cuts[1][0], dtype=torch.int64), 1)
    assert not needs_grad(replace(cuts[1][0], differentiable=False), 1)
