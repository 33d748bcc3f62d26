"""A loaded program runs on the tensors it was given, under the caller's modes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accept.graph import Chain, ProgramError, StageModule, StageProgram, trace

CPU = torch.device("cpu")


def load(module: nn.Module, *args: Tensor) -> StageModule:
    """The whole module as one stage on its own tensors."""
    traced = trace(module, args, {})
    chain = Chain.from_trace(traced)
    program = chain.program(0, len(chain.layers))
    return StageModule(program, traced.parameters, traced.buffers, program.constants, CPU)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))


def test_uses_the_users_own_objects() -> None:
    module = network()
    stage = load(module, torch.randn(4, 4))
    assert stage.parameters["0.weight"] is module[0].weight
    assert stage.buffers["1.running_mean"] is module[1].running_mean
    (output,) = stage.run([torch.randn(4, 4)], training=True)
    output.sum().backward()
    assert module[0].weight.grad is not None
    assert module[1].num_batches_tracked == 1
    stage.run([torch.randn(4, 4)], training=False)
    assert module[1].num_batches_tracked == 1


def test_plain_tensors_become_parameters_on_the_same_storage() -> None:
    module = network()
    module[3].bias.requires_grad_(False)
    program = load(module, torch.randn(4, 4)).program
    tensors = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    stage = StageModule(program, tensors, dict(module.named_buffers()), {}, CPU)
    assert isinstance(stage.parameters["0.weight"], nn.Parameter)
    assert stage.parameters["0.weight"].data_ptr() == tensors["0.weight"].data_ptr()
    assert stage.parameters["0.weight"].requires_grad
    assert not stage.parameters["3.bias"].requires_grad


def test_wrong_tensors_are_refused() -> None:
    module = network()
    program = load(module, torch.randn(4, 4)).program
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    with pytest.raises(ProgramError, match=r"needs the parameter '0\.weight'"):
        StageModule(program, {}, buffers, {}, CPU)
    with pytest.raises(ProgramError, match=r"parameter '0\.bias' has shape \(3,\).*\(8,\)"):
        StageModule(program, {**parameters, "0.bias": torch.zeros(3)}, buffers, {}, CPU)
    with pytest.raises(ProgramError, match=r"buffer '1\.running_var'.*float64"):
        StageModule(program, parameters, {**buffers, "1.running_var": torch.ones(8).double()}, {}, CPU)
    stage = StageModule(program, parameters, buffers, {}, CPU)
    with pytest.raises(ValueError, match="takes 1 tensors, got 2"):
        stage.run([torch.randn(4, 4)] * 2, training=True)


def test_another_weight_version() -> None:
    module = network()
    stage = load(module, torch.randn(4, 4))
    x = torch.randn(4, 4)
    old = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.parameters.items()}
    (before,) = stage.run([x], training=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    (after,) = stage.run([x], training=False)
    (again,) = stage.run([x], training=False, parameters=old)
    assert torch.equal(before, again)
    assert not torch.equal(before, after)
    again.sum().backward()
    assert old["0.weight"].grad is not None
    assert module[0].weight.grad is None
    (mixed,) = stage.run([x], training=False, parameters={"3.bias": old["3.bias"]})
    assert torch.allclose(mixed, after - 1)


def test_runs_under_the_callers_grad_mode_and_autocast() -> None:
    stage = load(network(), torch.randn(4, 4))
    x = torch.randn(4, 4)
    assert stage.run([x], training=True)[0].requires_grad
    with torch.no_grad():
        assert not stage.run([x], training=True)[0].requires_grad
    with torch.inference_mode():
        assert stage.run([x], training=False)[0].is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert stage.run([x], training=False)[0].dtype == torch.bfloat16


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            frozen = self.layer(x)
            with torch.enable_grad():
                live = self.layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = self.layer(x)
            with torch.autocast("cpu", enabled=False):
                full = self.layer(x)
        return frozen, live, half.float() + full


def test_regions_of_the_users_code() -> None:
    module = Regions()
    x = torch.randn(4, 4)
    for outputs in (module(x), load(module, x).run([x], training=True)):
        assert [output.requires_grad for output in outputs] == [False, True, True]
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        outputs = load(module, x).run([x], training=True)
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_values_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = load(Watched(), torch.randn(4, 4))
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    for _, _, steps in stage._plans[False]._groups:
        for step in steps:
            function = step.function

            def watch(*args: Any, function: Any = function) -> Any:
                nonlocal most
                result = function(*args)
                alive.append(weakref.ref(result))
                most = max(most, sum(ref() is not None for ref in alive))
                return result

            monkeypatch.setattr(step, "function", watch)
    with torch.no_grad():
        stage.run([torch.randn(4, 4)], training=False)
    assert len(alive) == 3
    assert most == 2


@pytest.mark.parametrize(
    ("module", "good", "bad"),
    [
        (nn.BatchNorm1d(4), (4, 4), (1, 4)),
        (nn.BatchNorm2d(4), (4, 4, 1, 1), (1, 4, 1, 1)),
        (nn.InstanceNorm1d(4), (4, 4, 3), None),
        (nn.GroupNorm(2, 4), (4, 4, 2), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_too_few_values_for_a_norm(module: nn.Module, good: tuple[int, ...], bad: tuple[int, ...] | None) -> None:
    stage = load(module, torch.randn(good))
    stage.run([torch.randn(good)], training=True)
    if bad is None:
        return
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as expected:
        module.train()(torch.randn(bad))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        stage.run([torch.randn(bad)], training=True)
    assert str(caught.value) == str(expected.value)
    stage.run([torch.randn(bad)], training=False)


class Norms(nn.Module):
    """Norms that see too few values only when the length is 1."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(4), nn.GroupNorm(4, 4)], ids=["instance", "group"])
def test_norms_over_a_length_that_varies(norm: nn.Module) -> None:
    module = Norms(norm)
    first = trace(module, (torch.randn(1, 4, 3),), {})
    traced = trace(module, (torch.randn(1, 4, 2),), {}, first)
    program = Chain.from_trace(traced).program(0, 1)
    stage = StageModule(program, traced.parameters, traced.buffers, program.constants, CPU)
    x = torch.randn(1, 4, 1)
    with pytest.raises(ValueError, match="Expected more than 1") as expected:
        module(x)
    with pytest.raises(ValueError, match="Expected more than 1") as caught:
        stage.run([x], training=True)
    assert str(caught.value) == str(expected.value)


def test_cudnn_is_this_machines_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = load(nn.BatchNorm1d(4), torch.randn(4, 4))
    step = next(
        s for _, _, steps in stage._plans[True]._groups for s in steps if s.node.op == "aten.batch_norm.default"
    )
    assert step.args[8] == torch.backends.cudnn.enabled


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.first(x))
        x = self.second(x)
        x[:, 0] = 0
        return x.mul_(2)


def test_in_place_operations_and_gradients() -> None:
    module = InPlace()
    x = torch.randn(4, 4, requires_grad=True)
    module(x).square().sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    x.grad = None
    load(module, x).run([x], training=True)[0].square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_program_needs_no_exporter() -> None:
    stage = load(network(), torch.randn(4, 4))
    program = StageProgram.from_json(stage.program.to_json())
    again = StageModule(program, stage.parameters, stage.buffers, {}, CPU)
    x = torch.randn(4, 4)
    assert torch.equal(again.run([x], training=False)[0], stage.run([x], training=False)[0])
