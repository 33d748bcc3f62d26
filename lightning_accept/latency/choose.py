"""From the name that a user gives to a latency model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from lightning_accept.latency.base import LatencyModel
from lightning_accept.latency.capacity import Capacity
from lightning_accept.latency.measured import Measured

_BY_NAME: dict[str, Callable[[], LatencyModel]] = {"measured": Measured, "capacity": Capacity}


def latency_factory(latency: str | LatencyModel) -> Callable[[], LatencyModel] | None:
    """What makes the latency model that ``latency`` names.

    Args:
        latency: ``measured``, ``capacity``, the path of a predictor file, a latency model (each run gets a copy), or
            ``flops`` for none.

    Raises:
        ValueError: If it is none of these, or not a predictor file.
    """
    if isinstance(latency, LatencyModel):
        return lambda: copy.deepcopy(latency)
    if latency == "flops":
        return None
    if latency in _BY_NAME:
        return _BY_NAME[latency]
    if not Path(latency).is_file():
        raise ValueError(
            f"latency={latency!r} is neither 'flops', 'measured' or 'capacity' nor the path of a predictor file; make"
            " one with: lightning-accept profile, then lightning-accept pretrain"
        )
    from lightning_accept.latency.predictor import Predictor

    predictor = Predictor.load(latency)
    return lambda: copy.deepcopy(predictor)
