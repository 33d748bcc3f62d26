"""What the planner is asked: layers, devices, links, limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_accept.partition.handling import Handling
from lightning_accept.partition.link import Link
from lightning_accept.partition.times import Floats, SubModelTimes


@dataclass(frozen=True)
class Device:
    """One device of the chain.

    Attributes:
        name: What names it in messages.
        times: Its seconds for every sub-model, for one batch.
        memory: Bytes it can spend on weights, versions, optimizer state and activations.
        weight_versions: Versions of its weights that it keeps, the current one included.
        in_flight: Batches whose activations it keeps at the same time.
        handling: What the codecs add to its stage; None for nothing.
        uplink: Bits per second that it sends at most, to all others together.
        downlink: Bits per second that it receives at most, from all others together.
    """

    name: str
    times: SubModelTimes
    memory: float = float("inf")
    weight_versions: int = 1
    in_flight: int = 1
    handling: Handling | None = None
    uplink: float = float("inf")
    downlink: float = float("inf")

    @property
    def handles(self) -> Handling:
        """What the codecs add to its stage."""
        return self.handling or Handling.none(self.times.layers + 1)


def _unlimited(_source: int, _target: int) -> Link:
    return Link()


@dataclass(frozen=True)
class Problem:
    """A chain of layers to be divided among a chain of devices.

    Attributes:
        devices: In the order of the chain; the first is the central node.
        forward_bytes: Bytes of the encoded activations that cross a cut, ``[layers + 1]``: entry p belongs to the cut
            before layer p, the last one to the output that returns to the central node, entry 0 to the model's input
            (only read with ``central_minimum=0``).
        backward_bytes: The same for the encoded gradients that travel the other way.
        link: ``link(a, b)`` is the link from device a to device b (indices into ``devices``), its forward direction
            being a to b. It is asked for neighbours, for ``link(d, 0)`` of a last device d, and with ``may_leave_out``
            for all pairs a < b. A device that is the only worker exchanges everything over ``link(0, d)``.
        weight_bytes: Bytes of each layer's weights, ``[layers]``; empty for no account of memory.
        activation_bytes: Bytes that each layer keeps for its backward, per batch, ``[layers]``; empty likewise.
        state_copies: Copies of the weights that a device keeps besides the versions: one for the gradient, one for
            momentum, two for Adam's moments.
        loss_time: Seconds per batch that the central node spends on the loss.
        central_minimum: Fewest layers on the central node; with 0 the input itself may be sent to a worker.
        may_leave_out: Whether workers may be left out; otherwise each takes at least one layer.
        share: Whether the central node must leave something to a worker, even if it is faster alone.
    """

    devices: Sequence[Device]
    forward_bytes: Sequence[int]
    backward_bytes: Sequence[int]
    link: Callable[[int, int], Link] = _unlimited
    weight_bytes: Sequence[int] = field(default=())
    activation_bytes: Sequence[int] = field(default=())
    state_copies: float = 0.0
    loss_time: float = 0.0
    central_minimum: int = 1
    may_leave_out: bool = False
    share: bool = False

    def __post_init__(self) -> None:
        """Refuse contradictions.

        Raises:
            ValueError: If lengths differ or a number is out of range.
        """
        if not self.devices:
            raise ValueError("a problem needs at least one device, the central node")
        for device in self.devices:
            if device.times.layers != self.layers:
                raise ValueError(
                    f"{device.name} has times for {device.times.layers} layers, but {self.devices[0].name} for "
                    f"{self.layers}"
                )
            if device.handles.cuts != self.layers + 1:
                raise ValueError(f"{device.name} has codec times for {device.handles.cuts} cuts, not {self.layers + 1}")
            if not (device.uplink > 0 and device.downlink > 0):
                raise ValueError(f"{device.name}: uplink and downlink must be above 0 bits per second")
            if not device.memory >= 0 or device.weight_versions < 1 or device.in_flight < 1:
                raise ValueError(
                    f"{device.name}: memory must not be negative, weight_versions and in_flight at least 1"
                )
        for name, values, length in (
            ("forward_bytes", self.forward_bytes, self.layers + 1),
            ("backward_bytes", self.backward_bytes, self.layers + 1),
            ("weight_bytes", self.weight_bytes, self.layers),
            ("activation_bytes", self.activation_bytes, self.layers),
        ):
            if len(values) != length and (len(values) or length > self.layers):
                raise ValueError(f"{name} must hold {length} numbers for {self.layers} layers, not {len(values)}")
            if len(values) and not min(values) >= 0:
                raise ValueError(f"{name} must not be negative")
        if not (self.state_copies >= 0 and 0 <= self.loss_time < float("inf")):
            raise ValueError("state_copies and loss_time must not be negative")
        if not 0 <= self.central_minimum <= self.layers:
            raise ValueError(f"central_minimum must be in 0..{self.layers} (the layers), not {self.central_minimum}")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.devices[0].times.layers

    def crossing(self) -> tuple[Floats, Floats]:
        """Bytes across every cut, forward and backward, each ``[layers + 1]``."""
        return np.asarray(self.forward_bytes, dtype=np.float64), np.asarray(self.backward_bytes, dtype=np.float64)

    def way(self, source: int, target: int) -> Link:
        """The link from one device to another, no faster than what the two send and receive."""
        link, there, back = self.link(source, target), self.devices[source], self.devices[target]
        return replace(
            link,
            forward_bandwidth=min(link.forward_bandwidth, there.uplink, back.downlink),
            backward_bandwidth=min(link.backward_bandwidth, back.uplink, there.downlink),
        )

    def memory_prefix(self, device: int) -> Floats:
        """Bytes that the layers before each cut need on ``device``, ``[layers + 1]``.

        Weights times (versions + state copies) plus activations times the batches in flight.
        """
        chosen = self.devices[device]
        return self._memory(chosen.weight_versions, chosen.in_flight)

    def memory_alone(self) -> float:
        """Bytes of the whole model trained on one device, without versions."""
        return float(self._memory(1, 1)[-1])

    def _memory(self, versions: int, in_flight: int) -> Floats:
        prefix = np.zeros(self.layers + 1)
        if len(self.weight_bytes):
            prefix[1:] += (versions + self.state_copies) * np.cumsum(np.asarray(self.weight_bytes, dtype=np.float64))
        if len(self.activation_bytes):
            prefix[1:] += in_flight * np.cumsum(np.asarray(self.activation_bytes, dtype=np.float64))
        return prefix
