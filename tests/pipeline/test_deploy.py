"""From a partition to deployments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accept.codecs import Fp16, Raw
from lightning_accept.graph import Chain, StageProgram, trace
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.pipeline.deploy import Settings, make_deployments, resolve_partition
from lightning_accept.pipeline.messages import Sources
from lightning_accept.pipeline.placement import Target

LAYERS = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("partition", "starts"), [([1, 2], [1, 2]), (["b", "d"], [1, 3]), (["c", 3], [2, 3]), ((1, "c"), [1, 2])]
)
def test_layers_by_index_or_name(partition: Any, starts: list[int]) -> None:
    assert resolve_partition(partition, LAYERS, 2) == starts


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([1], "names 1 first layers, but there are 2 workers"),
        (["b", "x"], "names layer 'x'; the layers are a, b, c, d"),
        ([0, 2], "does not rise strictly from 1 to 3; every stage"),
        (["c", "b"], "does not rise strictly"),
        ([1, 4], "does not rise strictly"),
    ],
)
def test_partitions_that_do_not_fit(partition: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_partition(partition, LAYERS, 2)


def make(
    in_flight: int, compress_output: bool | None = None, scale_lr: bool = False, **arguments: Any
) -> tuple[nn.Sequential, Any, list[Any]]:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    traced = trace(net, (torch.randn(4, 3),), {})
    chain = Chain.from_trace(traced)
    workers: Any = [SimpleNamespace(address=f"http://w{n}") for n in (1, 2)]
    codecs = (Fp16(), Raw(), Raw())
    settings = Settings(*codecs, weight_prediction=True, seed=7, compress_output=compress_output, scale_lr=scale_lr)
    starts = [len(chain.layers) - 2, len(chain.layers) - 1]
    schedule = default_schedule(2, in_flight)
    options = {"gradients": {}, "run": "r", "term": 3, "link_token": "t", **arguments}
    target = Target(traced, chain, starts, schedule, [optimizer], workers)
    return net, chain, make_deployments(target, settings, **options)


def test_every_worker_gets_its_layers_neighbours_and_state() -> None:
    net, chain, (first, second) = make(4)
    assert [(d.run, d.term, d.stage, d.stages, d.link_token) for d in (first, second)] == [
        ("r", 3, 1, 3, "t"),
        ("r", 3, 2, 3, "t"),
    ]
    assert (first.upstream, first.downstream) == (None, "http://w2")
    assert (second.upstream, second.downstream) == ("http://w1", None)
    assert StageProgram.from_json(second.spec["program"]).layers == [chain.layers[-1].name]
    assert {"param/3.weight", "param/3.bias", "optim/0/momentum_buffer/3.weight"} <= set(second.tensors)
    assert not any("0." in name for name in second.tensors if name.startswith("param"))
    assert torch.equal(second.tensors["param/3.weight"], net[3].weight.detach())
    assert second.spec["optimizers"][0]["class"] == "torch.optim.SGD"
    assert second.spec["codecs"]["forward"] != second.spec["codecs"]["backward"]


def test_in_flight_and_synchronous_stages_differ_in_order_seed_and_prediction() -> None:
    wanted = ("window", "weight_prediction", "scale_lr", "seed")
    in_flight = [[d.spec[name] for name in wanted] for d in make(4, scale_lr=True)[2]]
    assert in_flight == [[3, True, True, 7], [2, True, True, 7]]
    synchronous = [[d.spec[name] for name in wanted] for d in make(1, scale_lr=True)[2]]
    assert synchronous == [[None, False, False, None]] * 2


@pytest.mark.parametrize(("compress_output", "output"), [(None, "fp16"), (True, "fp16"), (False, "raw")])
def test_only_the_last_stage_knows_of_the_output(compress_output: bool | None, output: str) -> None:
    names = [d.spec["codecs"]["forward"]["name"] for d in make(4, compress_output=compress_output)[2]]
    assert names == ["fp16", output]


def test_what_workers_hold_is_left_out() -> None:
    sources = [Sources(2, {}), Sources(2, {"": ["param/3.weight"]})]
    first, second = make(4, sources=sources, gradients={"3.weight": torch.ones(3, 3), "3.bias": torch.ones(3)})[2]
    assert (first.sources, second.sources) == (sources[0], sources[1])
    assert set(second.tensors) == {"param/3.bias", "optim/0/momentum_buffer/3.bias", "grad/3.bias"}
    assert second.spec["optimizers"][0]["groups"][0]["params"] == ["3.weight", "3.bias"]
    assert list(second.spec["optimizer_state"][0]) == ["3.bias"]


def test_gradients_that_wait_for_their_update_travel_to_their_stage() -> None:
    gradients = {"3.weight": torch.ones(3, 3), "0.weight": torch.ones(3, 3)}
    first, second = make(4, gradients=gradients)[2]
    assert [name for d in (first, second) for name in d.tensors if name.startswith("grad/")] == ["grad/3.weight"]
    assert torch.equal(second.tensors["grad/3.weight"], gradients["3.weight"])
