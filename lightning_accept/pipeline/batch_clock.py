"""BatchClock: how long the central node is busy with everything but waiting and stage 0."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_accept.pipeline.central import CentralPipeline


class BatchClock:
    """Takes the time from one training step to the next.

    Args:
        pipeline: Tells how long the central node has waited, and how many batches it has completed.
        clock: Seconds, monotonic.
    """

    def __init__(self, pipeline: CentralPipeline, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._last: tuple[float, float, int, int] | None = None

    def lap(self) -> float | None:
        """Call when a step begins: seconds of the last one that were neither waiting nor stage 0's own.

        That is the loss, the data, the loop and its callbacks. None where it cannot be told: in the first step of a
        deployment, and while the pipeline fills, when no batch is completed.
        """
        pipeline = self._pipeline
        now = (self._clock(), pipeline.waited, pipeline.completed, pipeline.term)
        last, self._last = self._last, now
        if last is None or last[3] != now[3] or now[2] != last[2] + 1 or 0 not in pipeline.reports:
            return None
        report = pipeline.reports[0]
        jobs = 1 if pipeline.schedule is None else pipeline.schedule.micro_batches
        own = jobs * (report.forward + report.backward) + report.step
        return max(0.0, (now[0] - last[0]) - (now[1] - last[1]) - own)
