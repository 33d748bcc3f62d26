"""The link between two devices, and how long messages keep it busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_accept.partition.times import Floats


@dataclass(frozen=True)
class Speed:
    """How fast one direction of a link is.

    Attributes:
        bandwidth: Bits per second.
        latency: Seconds from the last bit sent to the last bit received.
    """

    bandwidth: float = float("inf")
    latency: float = 0.0


@dataclass(frozen=True)
class Link:
    """The way between two neighbouring devices of the chain; each direction has its own values.

    Attributes:
        forward_bandwidth: Bits per second in the direction in which activations travel.
        backward_bandwidth: Bits per second in the direction in which gradients travel.
        forward_latency: Seconds from the last bit sent to the last bit received, activations' direction.
        backward_latency: The same, gradients' direction.
        full_duplex: Whether both directions work at the same time.
    """

    forward_bandwidth: float = float("inf")
    backward_bandwidth: float = float("inf")
    forward_latency: float = 0.0
    backward_latency: float = 0.0
    full_duplex: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if not (self.forward_bandwidth > 0 and self.backward_bandwidth > 0):
            raise ValueError(
                f"bandwidths must be above 0 bits per second, not {self.forward_bandwidth} and "
                f"{self.backward_bandwidth}; leave the device out if the link is down"
            )
        if not (0 <= self.forward_latency < float("inf") and 0 <= self.backward_latency < float("inf")):
            raise ValueError(
                f"latencies must be finite and not negative, not {self.forward_latency} and {self.backward_latency} s"
            )

    @classmethod
    def between(cls, there: Speed, back: Speed, full_duplex: bool = True) -> Link:
        """The link whose forward direction is as fast as ``there``, and its backward direction as ``back``."""
        return cls(there.bandwidth, back.bandwidth, there.latency, back.latency, full_duplex)

    def reversed(self) -> Link:
        """The same link seen from the other end."""
        return Link(
            self.backward_bandwidth,
            self.forward_bandwidth,
            self.backward_latency,
            self.forward_latency,
            self.full_duplex,
        )

    def busy(self, forward: Floats, backward: Floats) -> Floats:
        """Seconds per batch for which the link is busy: no period can be shorter.

        The larger of the two directions in full duplex; in half duplex the sum of the transmissions (as in AccEPT,
        arXiv 2311.05827). Latency keeps nothing busy: the next message leaves when the last has left.

        Args:
            forward: Bytes in the activations' direction, any shape.
            backward: Bytes in the gradients' direction, same shape.
        """
        down = 8.0 * forward / self.forward_bandwidth
        up = 8.0 * backward / self.backward_bandwidth
        return np.maximum(down, up) if self.full_duplex else down + up
