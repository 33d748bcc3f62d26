"""What a device spends on the tensors that cross a cut: encoding, decoding, sending and taking them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_accept.partition.times import Floats


@dataclass(frozen=True)
class Handling:
    """Seconds per batch that a device's compute is held up by messages, for every cut, each ``[layers + 1]``.

    The device before a cut encodes activations and decodes gradients, the one after it does the reverse. Zero on a
    device with cores to spare, which does this beside the compute.

    Attributes:
        encode_forward: Encoding the activations.
        decode_forward: Decoding the activations.
        encode_backward: Encoding the gradients.
        decode_backward: Decoding the gradients.
    """

    encode_forward: Sequence[float]
    decode_forward: Sequence[float]
    encode_backward: Sequence[float]
    decode_backward: Sequence[float]

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for name, values in vars(self).items():
            if len(values) != self.cuts or not all(0 <= seconds < float("inf") for seconds in values):
                raise ValueError(f"{name} must hold {self.cuts} times, finite and not negative")

    @property
    def cuts(self) -> int:
        """Number of cuts, both ends of the model included."""
        return len(self.encode_forward)

    @property
    def before(self) -> Floats:
        """Seconds on the device before each cut, forward and backward together."""
        return np.asarray(self.encode_forward, dtype=np.float64) + np.asarray(self.decode_backward, dtype=np.float64)

    @property
    def after(self) -> Floats:
        """Seconds on the device after each cut, forward and backward together."""
        return np.asarray(self.decode_forward, dtype=np.float64) + np.asarray(self.encode_backward, dtype=np.float64)

    @classmethod
    def none(cls, cuts: int) -> Handling:
        """No time at all."""
        return cls(*([(0.0,) * cuts] * 4))
