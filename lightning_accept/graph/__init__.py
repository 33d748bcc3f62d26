"""From an ordinary module to stage programs: tracing, cutting into layers, and running the parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_accept.graph.errors import ProgramError, TraceError
from lightning_accept.graph.program import CutValue, StageProgram
from lightning_accept.graph.stage import StageModule

if TYPE_CHECKING:
    from lightning_accept.graph.chain import Chain, Layer
    from lightning_accept.graph.tracing import Trace, trace

__all__ = [
    "Chain",
    "CutValue",
    "Layer",
    "ProgramError",
    "StageModule",
    "StageProgram",
    "Trace",
    "TraceError",
    "trace",
]

# Workers only run programs: they are spared the exporter and sympy.
_LAZY = {"Chain": "chain", "Layer": "chain", "Trace": "tracing", "trace": "tracing"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
