"""Gradient clipping over all stages: what the central node asks for, and what a stage does with its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.pipeline.stage import NonFiniteActivation, StageExecutor

Squares = list[float | None]
"""For every optimizer the squared norm of one stage's gradients; None if it is not finite."""

Clips = list[dict[str, Any]]
"""What is to be done to gradients, in this order; JSON-able.

Each names its ``optimizer``, and one of: ``value``, a bound on every element; ``scale``, a factor; ``norm``, a bound on
the norm of all stages' gradients, with the squared norm ``outside`` the stages and those last ``known`` by stage.
"""


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """The squared 2-norm of all gradients together; infinity or NaN if one holds these."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack([norm.cpu() for norm in norms]).square().sum()) if norms else 0.0


def scale_for(limit: float, squared: float) -> float:
    """The factor that brings gradients of this squared norm within ``limit``, as ``clip_grad_norm_`` has it.

    Raises:
        NonFiniteActivation: If the norm is not finite.
    """
    if not math.isfinite(squared):
        raise NonFiniteActivation("the norm of the gradients is not finite; look at the input data and learning rate")
    return min(1.0, limit / (math.sqrt(squared) + 1e-6))


def estimate(known: Mapping[int, float], stages: int) -> float:
    """The squared norm over all stages; one that has not been heard of counts as much as the largest that has."""
    return sum(known.values()) + (stages - len(known)) * max(known.values(), default=0.0)


def stage_squares(executor: StageExecutor) -> Squares:
    """The squared norms of what a stage has added up, by optimizer."""
    squares = [squared_norm(executor.gradients_of(index)) for index in range(len(executor.optimizers))]
    return [square if math.isfinite(square) else None for square in squares]


def clip_stage(executor: StageExecutor, clips: Clips, squares: Mapping[int, Squares], stages: int) -> None:
    """Clip the gradients of one stage.

    Args:
        executor: The stage.
        clips: What to do.
        squares: Squared norms of this batch's gradients, by stage: this one's, and those known exactly of others.
        stages: Number of stages.

    Raises:
        NonFiniteActivation: If the norm is not finite.
    """
    for clip in clips:
        index = clip["optimizer"]
        if "value" in clip:
            executor.clamp_gradients(index, clip["value"])
            continue
        scale = clip.get("scale")
        if scale is None:
            known = {int(stage): square for stage, square in clip["known"].items()}
            known.update({stage: _finite(of_stage[index]) for stage, of_stage in squares.items()})
            scale = scale_for(clip["norm"], clip["outside"] + estimate(known, stages))
        if scale < 1.0:
            executor.scale_gradients(index, scale)


def squares_in(meta: Mapping[str, Any]) -> dict[int, Squares]:
    """The squared norms that a gradient brings from the stages it has passed, by stage number."""
    return {int(stage): of_stage for stage, of_stage in meta.get("norms", {}).items()}


class CentralClipping:
    """The central node's part: collects what is to be clipped, and knows the norms of all stages.

    In synchronous mode all stages have done their backward when the user clips, and their gradients bring the norms
    along: the factor is exact, and travels with the optimizer step. In flight, gradients are clipped as they pass: each
    stage knows the exact norms of the stages behind it, and of those before it the ones that the central node knew when
    the batch's gradient was sent. Which those are is fixed by the schedule, never by arrival.
    """

    def __init__(self) -> None:
        self._squares: dict[int, Squares] = {}
        self._pending: Clips = []
        self._stages = 0
        self._synchronous = True

    def deployed(self, stages: int, synchronous: bool) -> None:
        """Other stages are in place; norms of the previous ones mean nothing to them."""
        self._stages, self._synchronous = stages, synchronous
        self._squares = {}

    def by_value(self, index: int, limit: float) -> None:
        """Clip every element of the gradients of optimizer ``index``."""
        self._add({"optimizer": index, "value": float(limit)})
        for of_stage in self._squares.values() if self._synchronous else ():
            of_stage[index] = None

    def by_norm(self, index: int, limit: float, own: float) -> float:
        """Clip the gradients of optimizer ``index`` by the norm of all of them.

        Args:
            index: The optimizer.
            limit: The largest norm.
            own: Squared norm of the gradients that the caller holds.

        Returns:
            The factor for the gradients that the caller holds.

        Raises:
            NonFiniteActivation: If the norm is not finite.
            PipelineError: If the norm is not known any more.
        """
        if not self._synchronous:
            known = {stage: _finite(of_stage[index]) for stage, of_stage in self._squares.items()}
            self._add({"optimizer": index, "norm": float(limit), "outside": own, "known": known})
            return scale_for(limit, own + estimate(known, self._stages))
        if any(clip["optimizer"] == index and "value" in clip for clip in self._pending):
            raise PipelineError("gradients were clipped by value before; clip them by norm first, or by one of both")
        squares = [_finite(of_stage[index]) for of_stage in self._squares.values()]
        scale = scale_for(limit, own + sum(squares))
        self._add({"optimizer": index, "scale": scale})
        for of_stage, square in zip(self._squares.values(), squares, strict=True):
            of_stage[index] = square * scale**2
        return scale

    def zeroed(self, index: int) -> None:
        """The gradients of optimizer ``index`` are dropped."""
        self._pending = [clip for clip in self._pending if clip["optimizer"] != index]
        for of_stage in self._squares.values():
            of_stage[index] = 0.0

    def take(self) -> Clips:
        """What has been asked for since the last call."""
        clips, self._pending = self._pending, []
        return clips

    def learn(self, squares: Mapping[int, Squares]) -> None:
        """Take note of the exact norms of a batch, by stage."""
        self._squares.update(squares)

    def _add(self, clip: dict[str, Any]) -> None:
        if not self._synchronous and self._pending:
            raise PipelineError("with batches in flight gradients can be clipped once in a step")
        self._pending.append(clip)


def wants_norms(clips: Sequence[Mapping[str, Any]]) -> bool:
    """Whether stages must tell their norms for what is to be done."""
    return any("norm" in clip for clip in clips)


def _finite(square: float | None) -> float:
    if square is None:
        raise NonFiniteActivation("the norm of the gradients is not finite; look at the input data and learning rate")
    return square
