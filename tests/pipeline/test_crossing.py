"""Bytes across cuts, against what the codecs really write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_accept.codecs import Codec, MultiBit, Raw, StochasticUniform
from lightning_accept.graph import Chain, trace
from lightning_accept.pipeline.crossing import MESSAGE_BYTES, at_width, crossing, cut_bytes, small_output


@pytest.fixture(scope="module")
def chain() -> Chain:
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return Chain.from_trace(trace(net, (torch.randint(10, (12, 5)),), {}))


@pytest.mark.parametrize("batch", [None, 12, 7, 1])
@pytest.mark.parametrize(
    ("forward", "backward"), [(Raw(), Raw()), (MultiBit(2, levels="signed"), StochasticUniform(4, block=128))]
)
def test_bytes_are_what_the_codecs_write(chain: Chain, forward: Codec, backward: Codec, batch: int | None) -> None:
    down, up = crossing(chain, forward, backward, {}, batch)
    assert len(down) == len(up) == len(chain.layers) + 1
    for index in range(1, len(chain.layers) + 1):
        (value,) = chain.cut(index)
        tensor = torch.randn(batch or 12, *value.shape[1:])
        assert down[index] == MESSAGE_BYTES + forward.fresh().encode(tensor).nbytes
        assert up[index] == MESSAGE_BYTES + backward.fresh().encode(tensor).nbytes


def test_integers_take_no_gradient(chain: Chain) -> None:
    down, up = crossing(chain, Raw(), Raw(), {})
    assert down[0] == MESSAGE_BYTES + 12 * 5 * 8
    assert up[0] == MESSAGE_BYTES


def test_bits_in_force_count(chain: Chain) -> None:
    two, _ = crossing(chain, MultiBit(4), StochasticUniform(8), {"forward": 2})
    four, up = crossing(chain, MultiBit(4), StochasticUniform(8), {})
    half = crossing(chain, MultiBit(4), StochasticUniform(8), {"backward": 4})[1]
    assert two[1] < four[1]
    assert half[1] < up[1]


def test_the_output_may_have_other_codecs(chain: Chain) -> None:
    down, up = crossing(chain, MultiBit(4), StochasticUniform(8), {})
    others = crossing(chain, MultiBit(4), StochasticUniform(8), {"forward": 4}, output_codecs=(Raw(), Raw()))
    assert (others[0][:-1], others[1][:-1]) == (down[:-1], up[:-1])
    assert others[0][-1] == others[1][-1] == MESSAGE_BYTES + cut_bytes(chain)[-1]


def test_an_output_is_small_against_a_typical_cut(chain: Chain) -> None:
    assert cut_bytes(chain) == [4 * 12 * 5 * width for width in (6, 8, 3)]
    assert not small_output(cut_bytes(chain))
    assert small_output([1, 800, 900, 100])
    assert not small_output([1, 800, 900, 101])
    assert small_output([100])


def test_a_codec_without_a_width_keeps_none() -> None:
    assert at_width(Raw(), 4).bits is None
    assert at_width(MultiBit(4), 2).bits == 2
    assert at_width(MultiBit(4), None).bits == 4
