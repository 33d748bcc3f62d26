"""The methods that experiments compare: how the devices' times are known, and what travels on the links.

All of them go through the same pipeline, schedule search and weight prediction, so that a method's figures differ from
another's by nothing but what it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_accept.codecs import Codec, MultiBit, Raw, StochasticUniform

OUR_BITS = {"digits": (4, 4), "activity": (6, 4)}
"""Bits per activation and per gradient, by task: few bytes with which no more than half a point is lost on the task's
data (free levels, gradients in blocks). benchmarks/convergence.py: on digits 0.26 points are lost with 4 / 4, in the
mean of its two runs, and 1.27 with 3 / 4. benchmarks/accuracy.py: activity recognition, trained to the end, loses more
with 4 / 4."""

SCALED = ", learning rate by staleness"
"""What a method's label ends with where learning rates are divided by staleness."""

Codecs = tuple[Codec, Codec]
"""For activations and for gradients."""


def raw(task: str) -> Codecs:
    """Nothing is compressed."""
    return Raw(), Raw()


def paper(task: str) -> Codecs:
    """The paper's codecs at their first widths: signed levels, new in every epoch; one scale for a whole gradient."""
    return MultiBit(2, levels="signed", reinit_every_epoch=True), StochasticUniform(8)


def ours(task: str) -> Codecs:
    """Free levels, carried over epochs, and a scale for every 128 elements of a gradient; see :data:`OUR_BITS`."""
    forward, backward = OUR_BITS[task]
    return MultiBit(forward, levels="free"), StochasticUniform(backward, block=128)


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        latency: How the devices' times are known: ``capacity``, ``measured``, or ``predictor`` for a pre-trained file.
        codecs: Makes the codecs for a task.
        adaptive: Whether bit widths follow the learning rate. At a constant rate they stay at the first ones.
        options: Further arguments of AccEPTStrategy.
    """

    latency: str
    codecs: Callable[[str], Codecs]
    adaptive: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def codec_arguments(self, task: str) -> dict[str, Codec]:
        """The codecs as arguments of AccEPTStrategy.

        Args:
            task: A key of :data:`OUR_BITS`.
        """
        forward, backward = self.codecs(task)
        return {"forward_codec": forward, "backward_codec": backward}

    def strategy_arguments(self, task: str, predictor: str | None = None) -> dict[str, Any]:
        """Arguments of AccEPTStrategy, all but the workers.

        Args:
            task: A key of :data:`OUR_BITS`.
            predictor: A file of ``lightning-accept pretrain``, for methods that need one.

        Raises:
            ValueError: If a predictor is needed and not given.
        """
        if self.latency == "predictor" and predictor is None:
            raise ValueError("this method needs the file of a latency predictor")
        latency = predictor if self.latency == "predictor" else self.latency
        return {"latency": latency, **self.codec_arguments(task), **self.options}

    def callbacks(self) -> list[Any]:
        """Callbacks of the Trainer."""
        # Who only asks for the methods' names need not wait for Lightning.
        from lightning_accept import BitWidthScheduler

        return [BitWidthScheduler()] if self.adaptive else []


_UNCHECKED = {"check_plan": False}
"""In the papers, plans follow from ratios or predictions alone."""

METHODS = {
    "ftpipehd": Method("capacity", raw, options=_UNCHECKED),
    "predictor only": Method("predictor", raw, options=_UNCHECKED),
    "compression only": Method("capacity", paper, adaptive=True, options=_UNCHECKED),
    "accept": Method("predictor", paper, adaptive=True, options=_UNCHECKED),
    # Not leave_out, so that all methods have the same devices.
    "ours": Method("measured", ours, options={"micro_batches": "auto", "scale_lr_by_staleness": True}),
}
"""FTPipeHD's way (arXiv 2110.02781), what AccEPT (arXiv 2311.05827) adds to it, each alone and both, and ours."""
