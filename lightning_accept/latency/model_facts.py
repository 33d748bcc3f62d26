"""ModelFacts: what a planner needs to know of a model, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_accept.graph import Chain


@dataclass(frozen=True)
class CutFact:
    """One tensor that crosses a cut.

    Attributes:
        shape: Its shape.
        itemsize: Bytes per element.
        differentiable: Whether a gradient travels back for it.
    """

    shape: tuple[int, ...]
    itemsize: int
    differentiable: bool


@dataclass(frozen=True)
class ModelFacts:
    """A model whose sub-models are measured.

    Attributes:
        name: What the model is called, for people.
        layers: Names of the layers.
        flops: Forward FLOPs of each layer for one batch.
        weight_bytes: Bytes of each layer's parameters.
        activation_bytes: Bytes that each layer keeps for the backward of one batch.
        cuts: What enters each layer, and at last the outputs: one tuple per cut, ``layers + 1`` of them.
        batch: Batch size that is measured.

    Raises:
        ValueError: If lengths do not fit.
    """

    name: str
    layers: tuple[str, ...]
    flops: tuple[float, ...]
    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    cuts: tuple[tuple[CutFact, ...], ...]
    batch: int

    def __post_init__(self) -> None:
        layers = len(self.layers)
        if not layers or self.batch < 1:
            raise ValueError("a model needs at least one layer and a batch size of at least 1")
        for name in ("flops", "weight_bytes", "activation_bytes", "cuts"):
            length, wanted = len(getattr(self, name)), layers + (name == "cuts")
            if length != wanted:
                raise ValueError(f"a model of {layers} layers needs {wanted} values of {name}, not {length}")

    @classmethod
    def of(cls, chain: Chain, name: str) -> ModelFacts:
        """The facts of a traced module, for batches as traced.

        Args:
            chain: Its layers.
            name: What to call it.
        """
        layers = chain.layers
        cuts = tuple(
            tuple(CutFact(value.shape, value.dtype.itemsize, value.differentiable) for value in chain.cut(index))
            for index in range(len(layers) + 1)
        )
        return cls(
            name,
            tuple(layer.name for layer in layers),
            tuple(float(layer.flops) for layer in layers),
            tuple(layer.weight_bytes for layer in layers),
            tuple(layer.activation_bytes for layer in layers),
            cuts,
            chain.batch,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFacts:
        """The inverse of ``dataclasses.asdict``, by way of JSON."""
        return cls(
            name=str(value["name"]),
            layers=tuple(str(name) for name in value["layers"]),
            flops=tuple(float(flops) for flops in value["flops"]),
            weight_bytes=tuple(int(nbytes) for nbytes in value["weight_bytes"]),
            activation_bytes=tuple(int(nbytes) for nbytes in value["activation_bytes"]),
            cuts=tuple(
                tuple(
                    CutFact(
                        tuple(int(size) for size in one["shape"]), int(one["itemsize"]), bool(one["differentiable"])
                    )
                    for one in cut
                )
                for cut in value["cuts"]
            ),
            batch=int(value["batch"]),
        )
