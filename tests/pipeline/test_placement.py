"""What must travel when layers change hands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_accept.graph import Chain, trace
from lightning_accept.pipeline.placement import Holding, Passage, passage, place

A: Any = SimpleNamespace(address="a")
B: Any = SimpleNamespace(address="b")
C: Any = SimpleNamespace(address="c")


def holding(worker: Any, first: int, stop: int, *more: str) -> Holding:
    return Holding(worker, first, stop, (*(f"param/{layer}" for layer in range(first, stop)), *more))


BEFORE = [holding(None, 0, 2), holding(A, 2, 4), holding(B, 4, 6)]


def test_nothing_travels_where_nothing_changes() -> None:
    own = [{"": ["param/2", "param/3"]}, {"": ["param/4", "param/5"]}]
    assert passage(BEFORE, BEFORE) == Passage(own, [], 0)


def test_layers_go_to_neighbours_and_to_the_central_node() -> None:
    after = [holding(None, 0, 3), holding(A, 3, 5), holding(B, 5, 6)]
    assert passage(BEFORE, after) == Passage(
        [{"": ["param/3"], "b": ["param/4"]}, {"": ["param/5"]}], [(A, ["param/2"])], 2
    )


def test_layers_of_the_central_node_have_no_source() -> None:
    after = [holding(None, 0, 1), holding(A, 1, 2), holding(B, 2, 6)]
    assert passage(BEFORE, after) == Passage([{}, {"a": ["param/2", "param/3"], "": ["param/4", "param/5"]}], [], 3)


def test_workers_that_leave_and_join() -> None:
    after = [holding(None, 0, 2), holding(C, 2, 6)]
    assert passage(BEFORE, after) == Passage([{"a": ["param/2", "param/3"], "b": ["param/4", "param/5"]}], [], 4)
    after = [holding(None, 0, 5), holding(B, 5, 6)]
    assert passage(BEFORE, after).fetched == [(A, ["param/2", "param/3"]), (B, ["param/4"])]


def test_constants_of_several_stages_come_from_the_nearest() -> None:
    before = [holding(None, 0, 2, "const/k"), holding(A, 2, 4, "const/k"), holding(B, 4, 6, "const/m")]
    after = [holding(None, 0, 1, "const/m"), holding(A, 1, 4, "const/k"), holding(B, 4, 5, "const/m", "const/k")]
    after.append(holding(C, 5, 6, "const/k", "const/m"))
    travels = passage(before, after)
    assert travels.fetched == [], "the central node has all constants"
    assert [{k: v for k, v in s.items()} for s in travels.sources] == [
        {"": ["param/2", "param/3", "const/k"]},
        {"": ["param/4", "const/m"]},
        {"b": ["param/5", "const/m"]},
    ]


def test_stages_hold_what_their_programs_name() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3))
    chain = Chain.from_trace(trace(net, (torch.randn(4, 3),), {}))
    count = len(chain.layers)
    central, first, second = place(chain, [count - 2, count - 1], [A, B])
    assert (central.worker, first.worker, second.worker) == (None, A, B)
    assert (first.first, first.stop, second.first, second.stop) == (count - 2, count - 1, count - 1, count)
    assert "buffer/1.running_mean" in central.names
    assert first.names == ("param/2.weight", "param/2.bias")
