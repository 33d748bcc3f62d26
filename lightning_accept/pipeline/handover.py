"""Parts of a stage's state, by name: what one stage hands over to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_accept.pipeline.messages import Deployment, StageState


def part_of(state: StageState, names: Sequence[str]) -> StageState:
    """What belongs to ``names`` (``param/NAME``, ``buffer/NAME``, ``const/NAME``).

    A parameter brings its optimizer state and the gradient that waits for its optimizer step.

    Raises:
        ValueError: If one of the names is not there, or the state is none.
    """
    missing = [name for name in names if name not in state.tensors]
    if missing:
        raise ValueError(f"the stage does not hold {', '.join(missing)}")
    wanted = set(names)
    parameters = {name.removeprefix("param/") for name in names if name.startswith("param/")}
    tensors = {
        name: tensor for name, tensor in state.tensors.items() if name in wanted or _parameter_of(name) in parameters
    }
    scalars = [
        {name: dict(values) for name, values in of_one.items() if name in parameters}
        for of_one in optimizer_scalars(state.spec)
    ]
    return StageState({"optimizers": scalars}, tensors)


def joined(states: Iterable[StageState]) -> StageState:
    """Several parts as one."""
    scalars: list[dict[str, dict[str, Any]]] = []
    tensors: dict[str, Tensor] = {}
    for state in states:
        tensors.update(state.tensors)
        more = optimizer_scalars(state.spec)
        scalars += [{} for _ in more[len(scalars) :]]
        for known, of_one in zip(scalars, more, strict=False):
            known.update(of_one)
    return StageState({"optimizers": scalars}, tensors)


def completed(deployment: Deployment, part: StageState, address: str) -> Deployment:
    """``deployment`` with what the source at ``address`` holds among its tensors.

    Raises:
        ValueError: If the part is not all that was to come from there.
    """
    sources = deployment.sources
    assert sources is not None
    part = part_of(part, sources.names[address])
    own = StageState({"optimizers": deployment.spec["optimizer_state"]}, deployment.tensors)
    whole = joined([own, part])
    return replace(
        deployment,
        spec={**deployment.spec, "optimizer_state": whole.spec["optimizers"]},
        tensors=whole.tensors,
        sources=replace(sources, names={other: names for other, names in sources.names.items() if other != address}),
    )


def nbytes(state: StageState | Deployment) -> int:
    """Bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())


def optimizer_scalars(spec: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Per optimizer and parameter the state that is no tensor.

    Raises:
        ValueError: If it is something else.
    """
    scalars = spec.get("optimizers")
    if not isinstance(scalars, list) or not all(
        isinstance(of_one, dict) and all(isinstance(values, dict) for values in of_one.values()) for of_one in scalars
    ):
        raise ValueError("a state must hold a list of the optimizers' state, by parameter")
    return scalars


def _parameter_of(name: str) -> str | None:
    """The parameter that a gradient or a piece of optimizer state belongs to."""
    section, _, rest = name.partition("/")
    if section == "grad":
        return rest
    if section == "optim":
        return name.split("/", 3)[-1]
    return None
