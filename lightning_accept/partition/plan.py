"""The planner's answer."""

from __future__ import annotations

from dataclasses import dataclass


class PlanError(ValueError):
    """No partition satisfies the conditions; the message says which device or limit is in the way."""


@dataclass(frozen=True)
class StageLoad:
    """One stage of a plan.

    Attributes:
        device: Index of its device in the problem.
        name: The device's name.
        first: Its first layer.
        stop: The layer after its last.
        seconds: Forward plus backward of one batch and what the codecs add, on the central node with the loss.
        memory: Bytes predicted for weights, versions, optimizer state and activations.
        network: Seconds per batch for which its device sends or receives, whichever takes longer, on all links.
    """

    device: int
    name: str
    first: int
    stop: int
    seconds: float
    memory: float
    network: float = 0.0


@dataclass(frozen=True)
class LinkLoad:
    """One link of a plan.

    Attributes:
        source: Name of the device that sends activations.
        target: Name of the device that receives them.
        forward_bytes: Bytes per batch from source to target.
        backward_bytes: Bytes per batch from target to source.
        seconds: How long the link is busy per batch.
    """

    source: str
    target: str
    forward_bytes: float
    backward_bytes: float
    seconds: float


@dataclass(frozen=True)
class LeftOut:
    """A device without a stage.

    Attributes:
        device: Index in the problem.
        name: The device's name.
        reason: Why it was left out.
    """

    device: int
    name: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """A partition with what it is predicted to do.

    Attributes:
        stages: From the central node to the last worker.
        links: From the first hop to the last one back to the central node. A single worker has one link that carries
            both hops; without a worker there is none.
        period: Seconds per batch in the steady state: the slowest stage, device's network or link.
        bottleneck: Which that is, as ``stage 1 (pi-1)``, ``network of stage 1 (pi-1)`` or ``link pi-1 -> pi-2``.
        single: Name of the fastest device that holds the whole model by itself; None if none can.
        speedup: That device's time per batch over ``period``; None if no device can hold the model.
        left_out: Devices without a stage.
    """

    stages: tuple[StageLoad, ...]
    links: tuple[LinkLoad, ...]
    period: float
    bottleneck: str
    single: str | None
    speedup: float | None
    left_out: tuple[LeftOut, ...]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First layer of every stage."""
        return tuple(stage.first for stage in self.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Device index of every stage."""
        return tuple(stage.device for stage in self.stages)

    @property
    def link_bytes(self) -> float:
        """Bytes per batch on all links together."""
        return sum(link.forward_bytes + link.backward_bytes for link in self.links)
