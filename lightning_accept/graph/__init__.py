"""From an ordinary module to stage programs: tracing, cutting into layers, and running the parts."""

from lightning_accept.graph.chain import Chain, Layer
from lightning_accept.graph.errors import ProgramError, TraceError
from lightning_accept.graph.program import CutValue, StageProgram
from lightning_accept.graph.stage import StageModule
from lightning_accept.graph.trace import Trace, trace

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
