"""What may happen to a message on its way, chosen by chance but repeatably."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_accept.pipeline.messages import Packet


@dataclass(frozen=True)
class Disturbance:
    """What happens to one packet.

    Attributes:
        delay: Seconds that it takes to arrive.
        losses: How often it is lost and sent again before it arrives.
        duplicates: How often it arrives once more.
        late: Duplicates arrive only after the next packet of the same channel.
    """

    delay: float = 0.0
    losses: int = 0
    duplicates: int = 0
    late: bool = False


class RandomDisturbance:
    """A disturbance for every packet, the same for the same ``seed`` and packet whatever the order of sending.

    Args:
        seed: The seed.
        max_delay: Largest delay in seconds; delays are uniform.
        loss: Probability that an attempt is lost.
        duplicate: Probability of each further arrival.
    """

    def __init__(self, seed: int, *, max_delay: float = 0.01, loss: float = 0.0, duplicate: float = 0.0) -> None:
        if not (max_delay >= 0 and 0 <= loss < 1 and 0 <= duplicate < 1):
            raise ValueError("delays are not negative, and probabilities are at least 0 and below 1")
        self._seed = seed
        self._max_delay = max_delay
        self._loss = loss
        self._duplicate = duplicate

    def __call__(self, packet: Packet) -> Disturbance:
        """What happens to ``packet``."""
        # A string seed is hashed the same way in every process. Stages differ by their direction and payload only.
        chance = random.Random(f"{self._seed}/{packet.kind}/{packet.term}/{packet.job}/{packet.nbytes}")
        losses = duplicates = 0
        while chance.random() < self._loss:
            losses += 1
        while chance.random() < self._duplicate:
            duplicates += 1
        return Disturbance(chance.uniform(0.0, self._max_delay), losses, duplicates, late=chance.random() < 0.5)
