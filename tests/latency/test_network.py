"""The dual-stream network."""

from __future__ import annotations

import torch
from torch import nn

from lightning_accept.latency.network import DualStream


def test_every_pair_is_what_four_layers_say() -> None:
    network = DualStream(layers=3, profile=4, members=2, width=5, joined=6, seed=1)
    with torch.no_grad():
        network.last.weight.normal_()
    masks, profiles = torch.rand(7, 3), torch.rand(2, 3, 4)
    outputs = network(masks, profiles)
    assert outputs.shape == (2, 3, 7, 2)
    for member in range(2):
        weights = [(part.weight[member].T, part.bias[member, 0]) for part in network.children()]
        hidden = masks[5]
        for weight, bias in weights[:2]:
            hidden = nn.functional.gelu(nn.functional.linear(hidden, weight, bias))
        joined = nn.functional.gelu(nn.functional.linear(torch.cat([hidden, profiles[member, 1]]), *weights[2]))
        torch.testing.assert_close(outputs[member, 1, 5], nn.functional.linear(joined, *weights[3]))


def test_starts_at_zero_and_from_its_seed() -> None:
    one, same, other = (DualStream(3, 4, seed=seed) for seed in (1, 1, 2))
    assert not one(torch.rand(2, 3), torch.rand(1, 1, 4)).any()
    assert torch.equal(one.first.weight, same.first.weight)
    assert not torch.equal(one.first.weight, other.first.weight)
