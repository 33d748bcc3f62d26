"""A module whose forward goes through the pipeline, without Lightning."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.codecs import Raw
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.pipeline.module import PipelinedModule
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.pipeline.suspended import Call, SuspendedStep
from lightning_accept.remote.memory import MemoryCluster


def make_net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        *(nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Tanh()),
        *(nn.Conv1d(4, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def batch(length: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(5, 2, length, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pipelined() -> Iterator[Any]:
    pipelines: list[CentralPipeline] = []

    def make(in_flight: int = 1, partition: Any = "auto") -> PipelinedModule:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        pipeline = CentralPipeline(
            MemoryCluster(2, build_stage).workers,
            Settings(Raw(), Raw(), Raw(), weight_prediction=False, seed=0),
            device=torch.device("cpu"),
            timeout=30.0,
            batch_timeout=30.0,
        )
        pipelines.append(pipeline)
        pipeline.connect("me")
        schedule = default_schedule(2, in_flight)
        module = PipelinedModule(net, "net", pipeline, schedule, partition, lambda: [optimizer])
        module.install()
        return module

    yield make
    for pipeline in pipelines:
        pipeline.close()


def test_forward_and_backward_equal_the_plain_modules(pipelined: Any) -> None:
    ours, plain = pipelined(), make_net()
    inputs = [batch().requires_grad_() for _ in range(2)]
    outputs = [ours.module(inputs[0]), plain(inputs[1])]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(ours.module[0].weight.grad, plain[0].weight.grad)  # type: ignore[arg-type]
    ours.gather()
    assert torch.equal(ours.module[1].running_mean, plain[1].running_mean)
    assert ours.calls == 1


@pytest.mark.parametrize("training", [True, False])
def test_calls_without_gradients_equal_the_plain_modules(pipelined: Any, training: bool) -> None:
    ours, plain = pipelined(), make_net()
    with torch.no_grad():
        outputs = [net.train(training)(batch()) for net in (ours.module, plain)]
    assert torch.equal(*outputs)
    ours.gather()
    torch.testing.assert_close(ours.module.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_autocast_reaches_every_stage(pipelined: Any) -> None:
    ours, plain = pipelined(), make_net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [net(batch()) for net in (ours.module, plain)]
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)


def test_another_length_takes_a_new_trace_once_and_keeps_the_partition(pipelined: Any) -> None:
    ours = pipelined()
    with torch.no_grad():
        for length, term in ((6, 1), (9, 2), (4, 2), (6, 2)):
            ours.module(batch(length))
            assert ours.pipeline.term == term
            starts = ours.starts
    assert ours.starts == starts
    assert ours.accepts(Call((batch(11),), {}, None))
    assert not ours.accepts(Call((batch().double(),), {}, None))


def test_forward_is_given_back(pipelined: Any) -> None:
    ours = pipelined()
    ours.uninstall()
    ours.uninstall()
    assert "forward" not in vars(ours.module)
    own = ours.module.forward = lambda x: x
    ours.install()
    assert ours.module.forward is not own
    ours.uninstall()
    assert ours.module.forward is own


def test_partition_in_words(pipelined: Any) -> None:
    ours = pipelined(partition=[1, "7"])
    assert ours.partition == []
    with torch.no_grad():
        ours.module(batch())
    assert [layer for stage in ours.partition for layer in stage] == ours.layers
    assert ours.partition == [["0"], ["3"], ["7"]]
    assert ours.describe_partition() == "stage 0 (central node): 0; stage 1 (memory://1): 3; stage 2 (memory://2): 7"


def test_frozen_parameters_take_a_new_deployment_and_no_new_trace(pipelined: Any) -> None:
    ours = pipelined()
    call = Call((batch(),), {}, None)
    first = ours.prepare(call)
    ours.module[7].requires_grad_(False)
    assert not ours.accepts(call)
    assert ours.prepare(call) is first
    assert ours.pipeline.term == 2
    assert ours.accepts(call)


def test_a_batch_in_flight(pipelined: Any) -> None:
    ours, plain = pipelined(4), make_net()
    step = SuspendedStep(lambda: ours.module(batch()).square().sum(), "step")
    call = step.start()
    assert call is not None
    ticket = ours.begin(call, True)
    ours.pipeline.flush()
    output, leaves = ours.output(ticket)
    loss = step.resume(output)
    assert torch.equal(loss, plain(batch()).square().sum())
    loss.backward()
    assert leaves[0].grad is not None
    ours.pipeline.abandon()


def test_what_cannot_be_in_flight(pipelined: Any) -> None:
    ours = pipelined(4)
    with pytest.raises(PipelineError, match="an input of the pipelined module net requires grad"):
        ours.begin(Call((batch().requires_grad_(),), {}, None), True)
    ours.module.eval()
    with pytest.raises(PipelineError, match="net is to be trained in eval mode"):
        ours.begin(Call((batch(),), {}, None), True)


def test_eval_mode_outside_no_grad_gives_an_output_that_cannot_be_differentiated(pipelined: Any) -> None:
    ours, plain = pipelined(), make_net()
    output = ours.module.eval()(batch())
    assert torch.equal(output, plain.eval()(batch()))
    with pytest.raises(PipelineError, match="put the submodules that are to stay in eval mode"):
        output.sum().backward()


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_copy_says_why_it_cannot_be_made(pipelined: Any, how: Any) -> None:
    ours = pipelined()
    with pytest.raises(PipelineError, match="net cannot be copied while it is pipelined"):
        how(ours.module)
    ours.uninstall()
    how(ours.module)
