"""What to send: the minimum vertex cut, and what a stage computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.graph import Chain, trace
from lightning_accept.graph.flow import _vertex_cut


@pytest.mark.parametrize(
    ("sources", "costs", "fixed", "targets", "cut"),
    [
        ({"x": []}, {"x": 5}, {"x"}, {"x"}, {"x"}),
        ({"x": [], "big": ["x"]}, {"x": 5, "big": 50}, {"x"}, {"big"}, {"x"}),
        ({"x": [], "small": ["x"]}, {"x": 50, "small": 5}, {"x"}, {"small"}, {"small"}),
        ({"x": [], "small": ["x"]}, {"x": 50, "small": 5}, {"x"}, {"small", "x"}, {"x"}),
        ({"range": []}, {"range": 5}, set(), {"range"}, set()),
        ({"x": [], "y": [], "sum": ["x", "y"]}, {"x": 4, "y": 4, "sum": 9}, {"x", "y"}, {"sum"}, {"x", "y"}),
        ({"x": [], "y": [], "sum": ["x", "y"]}, {"x": 5, "y": 5, "sum": 9}, {"x", "y"}, {"sum"}, {"sum"}),
        ({"x": [], "a": ["x"], "b": ["x"]}, {"x": 5, "a": 3, "b": 3}, {"x"}, {"a", "b"}, {"x"}),
    ],
)
def test_vertex_cut(
    sources: dict[str, list[str]], costs: dict[str, int], fixed: set[str], targets: set[str], cut: set[str]
) -> None:
    assert set(_vertex_cut(sources, costs, fixed, targets)) == cut


class Masked(nn.Module):
    """A causal mask made of nothing, and an additive padding mask made in place from token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        padding = torch.zeros_like(ids, dtype=torch.float32).masked_fill_(ids == 0, float("-inf"))
        bias = padding[:, None, :].expand(-1, length, -1).masked_fill(causal, float("-inf"))
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(torch.softmax(x @ x.transpose(1, 2) + bias, -1).nan_to_num() @ x)
        return x


def test_masks_are_computed_again(pipeline: Any) -> None:
    module = Masked()
    ids = torch.randint(0, 10, (4, 6))
    chain = Chain.from_trace(trace(module, (ids,), {}))
    assert len(chain.layers) >= 4
    for index in range(1, len(chain.layers)):
        sent = [value for value in chain.cut(index) if not value.differentiable]
        # The padding mask as float32, which is smaller than the 64-bit ids and than anything expanded.
        assert len(sent) <= 1
        assert sum(value.nbytes for value in sent) <= 4 * 6 * 4
    stages = pipeline(module, (ids,), count=4)
    output = stages.forward((ids,), {}, True)
    assert torch.equal(output, module(ids))


class Alias(nn.Module):
    """A view is taken, and the memory behind it overwritten later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        view = x.view(-1, 2, 2)
        y = self.second(x.detach() * 1)
        view.mul_(2)
        return self.third(x + y)


def test_no_cut_before_memory_is_overwritten_through_a_view(pipeline: Any) -> None:
    module, x = Alias(), torch.randn(4, 4)
    expected = module(x)
    for count in (2, 3):
        stages = pipeline(module, (x,), count=count)
        assert [layer.name for layer in stages.chain.layers] == ["first", "second", "third"]
        assert torch.equal(stages.forward((x,), {}, True), expected)
