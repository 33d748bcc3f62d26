"""One stage at work: weight versions, gradients, updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.graph import Chain, StageModule, trace
from lightning_accept.pipeline.buffer_history import BufferHistory
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.pipeline.stage import Job, NonFiniteActivation, StageExecutor, check_finite, job_seed

RATE = 0.1


def make_net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2))


def make_stage(net: nn.Module, *, momentum: float = 0.0, predict: bool = False, **options: Any) -> StageExecutor:
    """The whole of ``net`` as one stage, which holds the net's own parameters."""
    traced = trace(net, (torch.randn(4, 3),), {})
    chain = Chain.from_trace(traced)
    program = chain.program(0, len(chain.layers))
    module = StageModule(program, traced.parameters, traced.buffers, program.constants, torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=momentum)
    options = {"optimizers": [optimizer], "seed": None, "stage": 1, **options}
    return StageExecutor(module, options.pop("optimizers"), weight_prediction=predict, **options)


def groups(stage: StageExecutor, **changes: Any) -> list[dict[str, Any]]:
    optimizer = stage.optimizers[0]
    assert optimizer is not None
    return [{**{k: v for k, v in g.items() if k != "params"}, **changes} for g in optimizer.param_groups]


def batch(seed: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_forward_and_backward_are_plain_autograd() -> None:
    net = make_net()
    stage = make_stage(net)
    x = batch(0).requires_grad_()
    expected = net(x)
    gradient = torch.randn_like(expected)
    of_input, *of_weights = torch.autograd.grad(expected, [x, *net.parameters()], gradient)
    (output,), needs_grad = stage.forward(Job(0, 0), [batch(0)], [True])
    assert torch.equal(output, expected)
    assert not output.requires_grad
    assert needs_grad == [True]
    (returned,) = stage.backward(0, [gradient])
    assert returned is not None
    assert torch.equal(returned, of_input)
    taken = stage.take_gradients()
    assert all(torch.equal(taken[name], g) for (name, _), g in zip(net.named_parameters(), of_weights, strict=True))
    assert stage.take_gradients() == {}


def test_an_unwanted_input_gradient_and_a_missing_output_gradient_are_none() -> None:
    stage = make_stage(make_net())
    stage.forward(Job(0, 0), [batch(0)], [False])
    stage.forward(Job(1, 1), [batch(1)], [True])
    assert stage.backward(0, [torch.ones(4, 2)]) == [None]
    assert stage.backward(1, [None]) == [None]


def test_the_backward_uses_the_version_of_the_forward() -> None:
    net = make_net()
    stage = make_stage(net)
    old = make_net()
    old.load_state_dict(net.state_dict())
    for number in (0, 1):
        stage.forward(Job(number, number), [batch(number)], [True])
    stage.backward(0, [torch.ones(4, 2)])
    stage.step(0, groups(stage))
    assert not torch.equal(weights(net)[0], weights(old)[0])
    (gradient,) = stage.backward(1, [torch.ones(4, 2)])
    x = batch(1).requires_grad_()
    (expected,) = torch.autograd.grad(old(x).sum(), x)
    assert gradient is not None
    assert torch.equal(gradient, expected)


def test_all_micro_batches_of_a_batch_use_the_version_of_the_first() -> None:
    net = make_net()
    stage = make_stage(net)
    stage.forward(Job(0, 0), [batch(0)], [True])
    (before,), _ = stage.forward(Job(1, 1, 0), [batch(1)], [True])
    stage.backward(0, [torch.ones(4, 2)])
    stage.step(0, groups(stage))
    (same,), _ = stage.forward(Job(2, 1, 1), [batch(1)], [True])
    assert torch.equal(before, same)
    (newer,), _ = stage.forward(Job(3, 2), [batch(1)], [True])
    assert not torch.equal(before, newer)


def test_prediction_moves_the_weights_by_the_updates_that_are_missing() -> None:
    net = make_net()
    stage = make_stage(net, momentum=0.9, predict=True)
    stage.forward(Job(0, 0), [batch(0)], [True])
    stage.backward(0, [torch.ones(4, 2)])
    stage.step(0, groups(stage))
    optimizer = stage.optimizers[0]
    assert optimizer is not None
    assert stage.staleness() == 0
    stage.forward(Job(1, 1), [batch(1)], [True])
    stage.forward(Job(2, 2, updates=False), [batch(2)], [True])
    assert stage.staleness() == 1
    (output,), _ = stage.forward(Job(3, 3), [batch(3)], [True])
    moved = {n: p - RATE * optimizer.state[p]["momentum_buffer"] for n, p in net.named_parameters()}
    torch.testing.assert_close(output, torch.func.functional_call(net, moved, (batch(3),)).detach())


def test_a_stale_gradient_moves_less_and_so_does_the_prediction() -> None:
    net = make_net()
    stage = make_stage(net, predict=True, momentum=0.9, scale_lr=True)
    for number in range(3):
        stage.forward(Job(number, number), [batch(number)], [True])
    moved = []
    for number in range(3):
        before = weights(net)
        stage.backward(number, [torch.ones(4, 2)])
        gradients = stage.unstepped_gradients()
        velocity = {
            name: 0.9 * stage.optimizers[0].state[p].get("momentum_buffer", 0.0) + gradients[name]  # type: ignore[union-attr]
            for name, p in net.named_parameters()
        }
        stage.step(0, groups(stage))
        for old, new, name in zip(before, weights(net), velocity, strict=True):
            torch.testing.assert_close(new, old - RATE / max(1, number) * velocity[name])
        moved.append(groups(stage)[0]["lr"])
    assert moved == [RATE] * 3
    stage.forward(Job(3, 3), [batch(3)], [True])
    stage.forward(Job(4, 4), [batch(4)], [True])
    optimizer = stage.optimizers[0]
    assert optimizer is not None
    (output,), _ = stage.forward(Job(5, 5), [batch(5)], [True])
    # Two updates are missing, each of half the learning rate.
    ahead = {n: p - RATE * optimizer.state[p]["momentum_buffer"] for n, p in net.named_parameters()}
    torch.testing.assert_close(output, torch.func.functional_call(net, ahead, (batch(5),)).detach())


def test_gradients_add_up_until_the_step_and_its_options_are_used() -> None:
    net = make_net()
    plain = make_net()
    plain.load_state_dict(net.state_dict())
    stage = make_stage(net)
    for number in (0, 1):
        stage.forward(Job(number, number), [batch(number)], [True])
        stage.backward(number, [torch.ones(4, 2)])
        plain(batch(number)).sum().backward()
    assert set(stage.unstepped_gradients()) == {name for name, _ in net.named_parameters()}
    stage.step(0, groups(stage, lr=0.3))
    torch.optim.SGD(plain.parameters(), lr=0.3).step()
    assert all(torch.equal(a, b) for a, b in zip(weights(net), weights(plain), strict=True))
    assert stage.updates_done == 1
    assert stage.unstepped_gradients() == {}


def test_kept_gradients_stay_until_they_are_zeroed() -> None:
    net = make_net()
    stage = make_stage(net)
    stage.forward(Job(0, 0), [batch(0)], [True])
    stage.backward(0, [torch.ones(4, 2)])
    start = weights(net)
    stage.step(0, groups(stage), keep_gradients=True)
    stage.step(0, groups(stage), keep_gradients=True)
    middle = weights(net)
    stage.zero_gradients(0)
    stage.step(0, groups(stage))
    assert not torch.equal(start[0], middle[0])
    assert all(torch.equal(a, b) for a, b in zip(middle, weights(net), strict=True))


def test_gradients_move_to_another_executor() -> None:
    net = make_net()
    first, second = make_stage(net), make_stage(net)
    first.forward(Job(0, 0), [batch(0)], [True])
    first.backward(0, [torch.ones(4, 2)])
    gradients = first.unstepped_gradients()
    second.restore_gradients({**gradients, "of another stage": torch.ones(1)})
    assert all(torch.equal(second.unstepped_gradients()[name], g) for name, g in gradients.items())


def test_a_shared_optimizer_keeps_its_options_and_the_gradients_of_others() -> None:
    net, other = make_net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*net.parameters(), other], lr=RATE)
    stage = make_stage(net, optimizers=[optimizer], shared_optimizers=True)
    other.grad = torch.ones(2)
    stage.forward(Job(0, 0), [batch(0)], [True])
    stage.backward(0, [torch.ones(4, 2)])
    start = weights(net)
    stage.step(0, groups(stage, lr=0.5))
    assert not torch.equal(start[0], weights(net)[0])
    assert torch.equal(other.detach(), torch.ones(2))
    assert other.grad is not None
    assert optimizer.param_groups[0]["lr"] == RATE


def test_evaluation_disturbs_nothing_and_uses_the_newest_weights() -> None:
    net = make_net()
    stage = make_stage(net)
    stage.forward(Job(0, 0), [batch(0)], [True])
    (output,) = stage.run([batch(5)], training=False)
    assert torch.equal(output, net.eval()(batch(5)).detach())
    assert [job.number for job in stage.outstanding] == [0]
    stage.backward(0, [torch.ones(4, 2)])
    assert stage.outstanding == []


def test_a_skipped_job_is_forgotten_and_an_unknown_one_refused() -> None:
    stage = make_stage(make_net())
    stage.forward(Job(0, 0), [batch(0)], [True])
    stage.skip(0)
    assert stage.staleness() == 0
    with pytest.raises(PipelineError, match="stage 1 holds no forward of job 0"):
        stage.backward(0, [None])


def test_random_operations_follow_the_seed_and_leave_the_global_state_alone() -> None:
    first, second = (make_stage(make_net(0.5), seed=3) for _ in range(2))
    second.module.parameters.update(first.module.parameters)
    state = torch.get_rng_state()
    (a,), _ = first.forward(Job(0, 7), [batch(0)], [True])
    torch.rand(5)
    (b,), _ = second.forward(Job(0, 7), [batch(0)], [True])
    (c,), _ = second.forward(Job(1, 8), [batch(0)], [True])
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    torch.set_rng_state(state)
    first.forward(Job(1, 8), [batch(0)], [True])
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_differ_by_stage_batch_and_micro_batch() -> None:
    seeds = {
        job_seed(seed, stage, Job(0, number, micro))
        for seed in (0, 1, 2**63 - 1)
        for stage in range(3)
        for number in range(20)
        for micro in range(4)
    }
    assert len(seeds) == 3 * 3 * 20 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_state_moves_with_its_optimizer() -> None:
    net = make_net()
    stage = make_stage(net, momentum=0.9)
    stage.forward(Job(0, 0), [batch(0)], [True])
    stage.backward(0, [torch.ones(4, 2)])
    stage.step(0, groups(stage))
    scalars, tensors = stage.gather()
    assert scalars["updates"] == 1
    assert {name.split("/")[0] for name in tensors} == {"param", "optim"}
    other = make_stage(net, momentum=0.9)
    other.restore_optimizers(scalars["optimizers"], tensors)
    assert other.gather()[1].keys() == tensors.keys()


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_numbers_that_are_not_finite(value: float, kind: str) -> None:
    tensor = torch.ones(5)
    tensor[3] = value
    with pytest.raises(NonFiniteActivation, match=f"^it holds {kind}; look at"):
        check_finite(tensor, "it")
    check_finite(torch.full((4,), torch.finfo(torch.float32).max), "its sum overflows, it does not")
    check_finite(torch.empty(0), "nothing")


def normed(history: bool) -> tuple[nn.Sequential, StageExecutor]:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    if not history:
        return net, make_stage(net)
    buffers = {f"1.{name}": buffer for name, buffer in net[1].named_buffers()}
    return net, make_stage(net, history=BufferHistory(buffers))


def counted(stage: StageExecutor) -> int:
    return int(stage.gather()[1]["buffer/1.num_batches_tracked"])


def test_a_state_leaves_outstanding_jobs_out_of_the_buffers() -> None:
    net, stage = normed(history=True)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    plain.load_state_dict(net.state_dict())
    for number in range(3):
        stage.forward(Job(number, number), [batch(number)], [False])
    stage.backward(0, [torch.ones(4, 2)])
    plain(batch(0))
    _, tensors = stage.gather()
    for name, buffer in plain.named_buffers():
        assert torch.equal(tensors[f"buffer/{name}"], buffer)
    assert net[1].num_batches_tracked == 3
    handed_over = stage.hand_over(["buffer/1.num_batches_tracked"])
    assert int(handed_over.tensors["buffer/1.num_batches_tracked"]) == 1
    stage.skip(1)
    assert counted(stage) == 2
    stage.skip(2, undo=True)
    assert counted(stage) == 2 == net[1].num_batches_tracked


def test_without_a_history_a_forward_counts_at_once() -> None:
    _, stage = normed(history=False)
    for number in range(2):
        stage.forward(Job(number, number), [batch(number)], [False])
    assert counted(stage) == 2
