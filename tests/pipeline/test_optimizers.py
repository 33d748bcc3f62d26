"""Optimizers as data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_accept.pipeline.optimizers import (
    TORCH_OPTIMIZERS,
    OptimizerError,
    apply_hyper_parameters,
    describe,
    hyper_parameters,
    pack_state,
    rebuild,
    state_copies,
    unpack_state,
)

# SparseAdam wants sparse gradients, Muon matrices only.
DENSE = sorted(name for name in TORCH_OPTIMIZERS if name.split(".")[-1] not in ("SparseAdam",))


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": nn.Parameter(torch.randn(3, 4, generator=generator)),
        "b.weight": nn.Parameter(torch.randn(4, 2, generator=generator)),
        "c.weight": nn.Parameter(torch.randn(2, 5, generator=generator)),
    }


def give_gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", DENSE)
def test_an_optimizer_rebuilt_for_some_parameters_goes_on_as_the_original(name: str) -> None:
    params = parameters()
    original = TORCH_OPTIMIZERS[name](
        [{"params": [params["a.weight"]], "lr": 0.01}, {"params": [params["b.weight"], params["c.weight"]], "lr": 0.02}]
    )  # type: ignore[call-arg]
    for seed in range(3):
        give_gradients(params, seed)
        original.step()
    names = {params["a.weight"]: "a.weight", params["c.weight"]: "c.weight"}
    spec = json.loads(json.dumps(describe(original, names)))
    scalars, tensors = pack_state([original], names)
    scalars = json.loads(json.dumps(scalars))
    copies = {n: nn.Parameter(params[n].detach().clone()) for n in ("a.weight", "c.weight")}
    rebuilt = rebuild(spec, copies, {})
    assert rebuilt is not None
    unpack_state([rebuilt], copies, scalars, tensors)
    for seed in range(3, 6):
        give_gradients(params, seed)
        for n, copy in copies.items():
            gradient = params[n].grad
            assert gradient is not None
            copy.grad = gradient.clone()
        original.step()
        rebuilt.step()
    for n, copy in copies.items():
        assert torch.equal(copy, params[n]), n


def test_param_groups_without_a_parameter_here_are_kept() -> None:
    params = parameters()
    original = torch.optim.SGD([{"params": [params["a.weight"]]}, {"params": [params["b.weight"]]}], lr=0.1)
    copy = nn.Parameter(params["b.weight"].detach().clone())
    rebuilt = rebuild(describe(original, {params["b.weight"]: "b.weight"}), {"b.weight": copy}, {})
    assert rebuilt is not None
    assert [len(group["params"]) for group in rebuilt.param_groups] == [0, 1]


def test_an_optimizer_without_a_parameter_here_is_none() -> None:
    original = torch.optim.SGD(parameters().values(), lr=0.1)
    assert rebuild(describe(original, {}), {}, {}) is None


def test_hyper_parameters_travel_exactly() -> None:
    params = parameters()
    source = torch.optim.AdamW(params.values(), lr=torch.tensor(0.1), betas=(0.8, 0.99), weight_decay=1 / 3)
    target = torch.optim.AdamW(parameters().values(), lr=1.0)
    apply_hyper_parameters(target, json.loads(json.dumps(hyper_parameters(source))))
    assert target.param_groups[0]["betas"] == (0.8, 0.99)
    assert target.param_groups[0]["weight_decay"] == 1 / 3
    assert target.param_groups[0]["lr"] == pytest.approx(0.1)


def test_hyper_parameters_for_other_groups_are_refused() -> None:
    optimizer = torch.optim.SGD(parameters().values(), lr=0.1)
    with pytest.raises(OptimizerError, match="param groups"):
        apply_hyper_parameters(optimizer, [])
    with pytest.raises(OptimizerError, match="parameters"):
        apply_hyper_parameters(optimizer, [{"params": []}])


class Own(torch.optim.SGD):
    """An optimizer that is not torch's."""


def test_a_class_outside_torch_needs_the_workers_permission() -> None:
    params = parameters()
    spec = describe(Own(params.values(), lr=0.1), {p: n for n, p in params.items()})
    with pytest.raises(OptimizerError, match=r"--allow-optimizer .*Own"):
        rebuild(spec, params, {})
    assert isinstance(rebuild(spec, params, {spec["class"]: Own}), Own)


def test_a_name_from_the_network_is_never_imported() -> None:
    params = parameters()
    spec: dict[str, Any] = {"class": "os.system", "groups": [{"options": {}, "params": ["a.weight"]}]}
    with pytest.raises(OptimizerError, match="not part of"):
        rebuild(spec, params, {})


def test_lbfgs_is_refused() -> None:
    with pytest.raises(OptimizerError, match="LBFGS"):
        describe(torch.optim.LBFGS(parameters().values()), {})


class Demanding(torch.optim.SGD):
    """Wants an argument besides its param groups."""

    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=scale)


def test_a_class_that_wants_more_than_param_groups_is_named() -> None:
    params = parameters()
    spec = describe(Demanding(params.values(), 0.1), {p: n for n, p in params.items()})
    with pytest.raises(OptimizerError, match=r"Demanding cannot be rebuilt .*scale"):
        rebuild(spec, params, {spec["class"]: Demanding})


def test_an_option_that_is_no_number_is_refused() -> None:
    optimizer = torch.optim.SGD(parameters().values(), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(OptimizerError, match="shape"):
        hyper_parameters(optimizer)
    optimizer.param_groups[0]["lr"] = object()
    with pytest.raises(OptimizerError, match="object"):
        hyper_parameters(optimizer)


def test_state_of_tensors_and_numbers_round_trips() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params.values())
    give_gradients(params, 0)
    optimizer.step()
    optimizer.state[params["a.weight"]]["note"] = 3
    scalars, tensors = pack_state([None, optimizer], {p: n for n, p in params.items()})
    assert scalars[0] == {}
    assert scalars[1]["a.weight"] == {"note": 3}
    others = parameters(1)
    target = torch.optim.Adam(others.values())
    unpack_state([None, target], others, scalars, tensors)
    state: dict[str, Tensor] = target.state[others["a.weight"]]
    assert state["note"] == 3
    assert torch.equal(state["exp_avg"], optimizer.state[params["a.weight"]]["exp_avg"])


def test_tensors_kept_per_parameter_are_those_of_the_state_or_what_is_usual() -> None:
    values = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    plain, momentum, adam = SGD(values, lr=0.1), SGD(values, lr=0.1, momentum=0.9), AdamW(values)
    assert [state_copies(one) for one in ([], [plain], [momentum], [adam], [plain, adam])] == [0, 0, 1, 2, 2]
    amsgrad = AdamW(values, amsgrad=True)
    values[0].grad = torch.ones(3)
    amsgrad.step()
    assert state_copies([momentum, amsgrad]) == 3  # its step count is one number
