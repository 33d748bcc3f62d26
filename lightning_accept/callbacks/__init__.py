"""Lightning callbacks that steer and watch the pipeline while it trains."""

from lightning_accept.callbacks.bit_width import BitWidthScheduler
from lightning_accept.callbacks.feedback import PredictorFeedback
from lightning_accept.callbacks.monitor import PipelineMonitor
from lightning_accept.callbacks.repartition import Repartition

__all__ = ["BitWidthScheduler", "PipelineMonitor", "PredictorFeedback", "Repartition"]
