"""Lightning callbacks that steer the pipeline while it trains."""

from lightning_accept.callbacks.bit_width import BitWidthScheduler

__all__ = ["BitWidthScheduler"]
