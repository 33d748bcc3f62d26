"""Stages give to the bit what the module itself gives: outputs, gradients, buffers, in both modes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_accept.graph import trace

ALL = [
    "mobilenet_v2",
    "resnet18",
    "vision_transformer",
    "googlenet",
    "text",
    "conv1d",
    "unet",
    "tied",
    "frozen",
    "stateful",
    "recurrent",
]


def assert_same(ours: Any, theirs: Any) -> None:
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def follow(
    module: nn.Module,
    calls: list[Any],
    stages: Callable[..., Any],
    loss_of: Callable[[Any], Tensor],
    autocast: bool,
) -> None:
    def region() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()

    reference = copy.deepcopy(module).train()
    args, kwargs = calls[0]
    pipeline = stages(trace(module, args, kwargs), 3)
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
        for model in (reference, module)
    ]
    for step, (args, kwargs) in enumerate(calls):
        if not pipeline.trace.accepts(args, kwargs):
            assert pipeline.trace.describe_mismatch(args, kwargs)
            pipeline = stages(trace(module, args, kwargs, pipeline.trace), 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(step)
        with region():
            expected = reference(*args, **kwargs)
            loss_of(expected).backward()
        torch.manual_seed(step)
        with region():
            output = pipeline.forward(args, kwargs, training=True)
            loss_of(output).backward()
            pipeline.backward()
        assert_same(output, expected)
        for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
        for (name, ours), theirs in zip(module.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
        for optimizer in optimizers:
            optimizer.step()

    # Without gradients PyTorch's attention takes another kernel, whose sums are in another order.
    reference.eval()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), region():
            expected = reference(*args, **kwargs)
            output = pipeline.forward(args, kwargs, training=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    assert_same(output, expected)


@pytest.mark.parametrize(("case", "name"), [(name, name) for name in ALL], indirect=["case"], ids=ALL)
def test_float32(case: Any, name: str, stages: Any, weighted_loss: Any) -> None:
    module, calls = case
    follow(module, calls, stages, weighted_loss, autocast=False)


AUTOCAST = ["resnet18", "vision_transformer", "text", "conv1d", "unet", "frozen", "recurrent"]


@pytest.mark.parametrize("case", AUTOCAST, indirect=True, ids=AUTOCAST)
def test_autocast_bfloat16(case: Any, stages: Any, weighted_loss: Any) -> None:
    module, calls = case
    follow(module, calls[:2], stages, weighted_loss, autocast=True)
