"""A stage's state goes back to the user's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.pipeline.gather import restore_state
from lightning_accept.pipeline.messages import PipelineError, StageState


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.BatchNorm1d(3)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def restore(net: nn.Module, optimizer: Any, tensors: dict[str, Tensor]) -> None:
    state = StageState({"optimizers": [{"weight": {}}]}, tensors)
    restore_state(state, dict(net.named_parameters()), dict(net.named_buffers()), [optimizer])


def test_parameters_buffers_and_optimizer_state_are_written_in_place() -> None:
    net, optimizer = make()
    parameter, buffer = net.weight, net.running_mean
    tensors = {
        "param/weight": torch.full((3,), 2.0),
        "buffer/running_mean": torch.full((3,), 3.0),
        "optim/0/momentum_buffer/weight": torch.full((3,), 4.0),
        "grad/weight": torch.full((3,), 5.0),
    }
    restore(net, optimizer, tensors)
    assert net.weight is parameter
    assert net.running_mean is buffer
    assert isinstance(parameter, nn.Parameter)
    assert torch.equal(parameter.detach(), tensors["param/weight"])
    assert torch.equal(buffer, tensors["buffer/running_mean"])  # type: ignore[arg-type]
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], tensors["optim/0/momentum_buffer/weight"])
    assert parameter.requires_grad
    assert parameter.grad is None


@pytest.mark.parametrize("name", ["param/nothing", "buffer/weight", "other/weight", "weight"])
def test_what_the_module_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(PipelineError, match="does not fit the module"):
        restore(*make(), {name: torch.ones(3)})


def test_another_shape_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"gathered param 'weight' of shape \(4,\) does not fit"):
        restore(*make(), {"param/weight": torch.ones(4)})
