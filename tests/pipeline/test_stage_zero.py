"""Stage 0 among the user's own objects: buffers, and gradients that wait for their optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, trace
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.stage import Job, StageExecutor
from lightning_accept.pipeline.stage_zero import UserGradients, build_stage0


@pytest.fixture
def parts() -> tuple[UserGradients, dict[str, nn.Parameter], list[Any]]:
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    optimizers = [torch.optim.SGD([parameters["a"]]), torch.optim.SGD([parameters["b"], parameters["c"]])]
    gradients = UserGradients()
    gradients.done([0, 1])  # before the first deployment
    gradients.settle_in(parameters, optimizers, {}, [])
    return gradients, parameters, optimizers


def give(gradients: UserGradients, parameters: dict[str, nn.Parameter], names: str) -> None:
    for name in names:
        parameters[name].grad = torch.ones(2)
    gradients.added(names)


def test_a_step_or_zero_grad_of_an_optimizer_ends_the_waiting_of_its_parameters(parts: Any) -> None:
    gradients, parameters, _ = parts
    give(gradients, parameters, "abc")
    assert list(gradients.waiting()) == ["a", "b", "c"]
    assert gradients.waiting()["b"] is parameters["b"].grad
    gradients.done([1])
    assert list(gradients.waiting()) == ["a"]
    parameters["a"].grad = None
    assert gradients.waiting() == {}


def test_gradients_come_and_go_with_their_parameters(parts: Any) -> None:
    gradients, parameters, optimizers = parts
    give(gradients, parameters, "ab")
    kept, left = parameters["a"].grad, dict(parameters)
    waiting = gradients.waiting()
    gradients.settle_in({name: left[name] for name in "ac"}, optimizers, {**waiting, "c": torch.full((2,), 3.0)}, [])
    assert parameters["a"].grad is kept
    assert parameters["b"].grad is None
    assert torch.equal(parameters["c"].grad, torch.full((2,), 3.0))
    assert list(gradients.waiting()) == ["a", "c"]


def test_gradients_that_were_dropped_meanwhile_do_not_come(parts: Any) -> None:
    gradients, parameters, optimizers = parts
    gradients.settle_in(parameters, optimizers, {"a": torch.ones(2), "c": torch.ones(2)}, [1])
    assert list(gradients.waiting()) == ["a"]
    assert parameters["c"].grad is None


def test_nothing_is_left_where_batches_are_in_flight(parts: Any) -> None:
    gradients, parameters, optimizers = parts
    give(gradients, parameters, "abc")
    gradients.settle_in({}, optimizers, gradients.waiting(), [])
    assert gradients.waiting() == {}
    assert all(parameter.grad is None for parameter in parameters.values())


def build(in_flight: int, net: nn.Module, inference: bool = False) -> StageExecutor:
    traced = trace(net, (torch.randn(4, 3),), {})
    chain = Chain.from_trace(traced)
    settings = Settings(Raw(), Raw(), Raw(), weight_prediction=False, seed=0)
    schedule = default_schedule(2, in_flight)
    with torch.inference_mode(inference):
        return build_stage0(traced, chain, len(chain.layers), schedule, [], settings, torch.device("cpu"))


def test_in_flight_the_users_buffers_change_with_the_backward() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    stage = build(4, net, inference=True)
    for number in range(3):
        stage.forward(Job(number, number), [torch.randn(4, 3)], [False])
    assert net[1].num_batches_tracked == 0
    assert not net[1].running_mean.any()
    stage.backward(0, [torch.ones(4, 3)])
    assert net[1].num_batches_tracked == 1
    assert net[1].running_mean.any()
    for number in (1, 2):
        stage.skip(number, undo=True)
    assert net[1].num_batches_tracked == 1
    stage.forward(Job(3, 3), [torch.randn(4, 3)], [False])
    stage.skip(3)
    assert net[1].num_batches_tracked == 2


def test_in_synchronous_mode_they_change_with_the_forward() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    build(1, net).forward(Job(0, 0), [torch.randn(4, 3)], [False])
    assert net[1].num_batches_tracked == 1
