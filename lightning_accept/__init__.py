"""Train one LightningModule across weak, unequal devices joined by slow links."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_accept.version import __version__

if TYPE_CHECKING:
    from lightning_accept.callbacks import BitWidthScheduler, PipelineMonitor, PredictorFeedback, Repartition
    from lightning_accept.codecs import Bf16, Fp16, MultiBit, Raw, StochasticUniform
    from lightning_accept.strategy import AccEPTStrategy

# Loaded at first use: a worker imports this package, and must not pay for Lightning.
_EXPORTS = {
    "AccEPTStrategy": "lightning_accept.strategy",
    "Bf16": "lightning_accept.codecs",
    "BitWidthScheduler": "lightning_accept.callbacks",
    "Fp16": "lightning_accept.codecs",
    "MultiBit": "lightning_accept.codecs",
    "PipelineMonitor": "lightning_accept.callbacks",
    "PredictorFeedback": "lightning_accept.callbacks",
    "Raw": "lightning_accept.codecs",
    "Repartition": "lightning_accept.callbacks",
    "StochasticUniform": "lightning_accept.codecs",
}

__all__ = [
    "AccEPTStrategy",
    "Bf16",
    "BitWidthScheduler",
    "Fp16",
    "MultiBit",
    "PipelineMonitor",
    "PredictorFeedback",
    "Raw",
    "Repartition",
    "StochasticUniform",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
