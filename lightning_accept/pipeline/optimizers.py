"""Optimizers as data: described on the central node, rebuilt on a worker for the parameters of its stage."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

HyperParameters = list[dict[str, Any]]
"""The options of every param group (``lr``, ``momentum``, ...), all but the parameters themselves."""

TORCH_OPTIMIZERS: dict[str, type[Optimizer]] = {
    f"torch.optim.{name}": value
    for name, value in vars(torch.optim).items()
    # LBFGS evaluates the loss several times per step, which a pipeline cannot do.
    if isinstance(value, type) and issubclass(value, Optimizer) and value not in (Optimizer, torch.optim.LBFGS)
}


class OptimizerError(ValueError):
    """An optimizer cannot be used in the pipeline; the message says what to change."""


def class_name(optimizer: Optimizer) -> str:
    """The name under which a worker looks the optimizer's class up.

    Raises:
        OptimizerError: For LBFGS.
    """
    cls = type(optimizer)
    for name, known in TORCH_OPTIMIZERS.items():
        if known is cls:
            return name
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError("LBFGS evaluates the loss several times per step; choose a first-order optimizer")
    return f"{cls.__module__}.{cls.__qualname__}"


def foreign_classes(optimizers: Sequence[Optimizer]) -> list[str]:
    """Names of the optimizers' classes outside ``torch.optim`` that another process can import."""
    names = {class_name(optimizer) for optimizer in optimizers} - set(TORCH_OPTIMIZERS)
    found = []
    for name in sorted(names):
        module = name.rpartition(".")[0]
        with suppress(ImportError, ValueError):  # a class within another class or function
            if module != "__main__" and importlib.util.find_spec(module) is not None:
                found.append(name)
    return found


def hyper_parameters(optimizer: Optimizer) -> HyperParameters:
    """The options of every param group as JSON-able values; a learning rate kept in a tensor becomes a number."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def apply_hyper_parameters(optimizer: Optimizer, groups: HyperParameters) -> None:
    """Set the options that :func:`hyper_parameters` read elsewhere."""
    if len(groups) != len(optimizer.param_groups):
        raise OptimizerError(f"{len(groups)} param groups announced, {len(optimizer.param_groups)} deployed")
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            if key == "params":
                raise OptimizerError("hyper-parameters cannot replace the parameters")
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def describe(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """What a worker needs to rebuild ``optimizer`` for the parameters in ``names``; other parameters are left out."""
    groups = []
    for options, group in zip(hyper_parameters(optimizer), optimizer.param_groups, strict=True):
        groups.append({"options": options, "params": [names[p] for p in group["params"] if p in names]})
    return {"class": class_name(optimizer), "groups": groups}


def rebuild(
    spec: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], allowed: Mapping[str, type[Optimizer]]
) -> Optimizer | None:
    """The optimizer of one stage; None if it has no parameters there. Every param group is kept, also an empty one.

    Args:
        spec: What :func:`describe` returned.
        parameters: The stage's parameters by name.
        allowed: Classes beyond ``torch.optim`` that the worker was started with.

    Raises:
        OptimizerError: If the class is not allowed, or does not accept the options.
    """
    if not any(group["params"] for group in spec["groups"]):
        return None
    name = spec["class"]
    cls = TORCH_OPTIMIZERS.get(name) or allowed.get(name)
    if cls is None:
        raise OptimizerError(
            f"optimizer {name} is not part of torch.optim; start this worker with --allow-optimizer {name}"
        )
    groups = []
    for group in spec["groups"]:
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in group["options"].items()}
        groups.append({**options, "params": [parameters[n] for n in group["params"]]})
    try:
        return cls(groups)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise OptimizerError(f"optimizer {name} cannot be rebuilt from its param groups: {error}") from error


def pack_state(
    optimizers: Sequence[Optimizer | None], names: Mapping[nn.Parameter, str]
) -> tuple[list[dict[str, dict[str, Any]]], dict[str, Tensor]]:
    """Per-parameter optimizer state as JSON-able scalars and named tensors (``optim/<index>/<key>/<parameter>``)."""
    scalars: list[dict[str, dict[str, Any]]] = []
    tensors: dict[str, Tensor] = {}
    for index, optimizer in enumerate(optimizers):
        values: dict[str, dict[str, Any]] = {}
        scalars.append(values)
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            name = names.get(parameter) if isinstance(parameter, nn.Parameter) else None
            if name is None:
                continue
            values[name] = {}
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optim/{index}/{key}/{name}"] = value.detach()
                else:
                    values[name][key] = _plain(value)
    return scalars, tensors


def unpack_state(
    optimizers: Sequence[Optimizer | None],
    parameters: Mapping[str, nn.Parameter],
    scalars: Sequence[Mapping[str, Mapping[str, Any]]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Put state that :func:`pack_state` took elsewhere into ``optimizers``, replacing that of the same parameters."""
    for optimizer, values in zip(optimizers, scalars, strict=True):
        for name, state in values.items():
            if optimizer is not None and name in parameters:
                optimizer.state[parameters[name]] = dict(state)
    for full_name, tensor in tensors.items():
        if not full_name.startswith("optim/"):
            continue
        _, index, key, name = full_name.split("/", 3)
        optimizer = optimizers[int(index)]
        if optimizer is not None and name in parameters:
            parameter = parameters[name]
            # Step counters live on the CPU unless the optimizer asks otherwise; all else is where the parameter is.
            device = tensor.device if key == "step" else parameter.device
            optimizer.state[parameter][key] = tensor.to(device, copy=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise OptimizerError(f"a param group option holds a tensor of shape {tuple(value.shape)}, not a number")
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise OptimizerError(f"an option of type {type(value).__name__} cannot travel to a worker: {value!r}")


def state_copies(optimizers: Sequence[Optimizer]) -> int:
    """Tensors per parameter that the optimizers keep: as many as the fullest state shows, else what is usual."""
    most = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            most = max(most, sum(getattr(value, "dim", lambda: 0)() > 0 for value in state.values()))
        if not optimizer.state:
            options = optimizer.defaults
            most = max(most, 2 if "betas" in options else 1 if options.get("momentum") else 0)
    return most
