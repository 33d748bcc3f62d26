"""StageRecorder: keeps what one stage does, as events and as figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_accept.pipeline.events import Event, EventLog


@dataclass
class StageFigures:
    """What one stage has done in the present term.

    Attributes:
        forward_seconds: Seconds of all forwards.
        backward_seconds: Seconds of all backwards.
        step_seconds: Seconds of all optimizer steps.
        waiting_seconds: Seconds without work.
        jobs: Jobs backwarded or skipped.
        staleness: Updates between the forward of the job that was last backwarded and its own update.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    step_seconds: float = 0.0
    waiting_seconds: float = 0.0
    jobs: int = 0
    staleness: int = 0


class StageRecorder:
    """Keeps events and figures of a stage. Times are seconds on this device's clock.

    Args:
        log: Where events go.
        stage: Number of the stage.
        term: The term.
    """

    def __init__(self, log: EventLog, stage: int, term: int) -> None:
        self.log = log
        self.figures = StageFigures()
        self.last_step = 0.0
        """Seconds of the last optimizer step."""
        self._stage = stage
        self._term = term
        self._forwards: dict[int, tuple[float, int]] = {}

    def forwarded(self, job: int, batch: int, micro: int, start: float, end: float, updates: int) -> None:
        """A job was forwarded; ``updates`` is the number of optimizer steps taken by then."""
        self._forwards[job] = (end - start, updates)
        self.figures.forward_seconds += end - start
        self._record("forward", start, end, job, batch, micro)

    def backwarded(self, job: int, batch: int, micro: int, start: float, end: float, updates: int) -> float | None:
        """A job was backwarded; returns the seconds of its forward, None if it had none (an empty micro-batch)."""
        forward = self._forwards.pop(job, None)
        self.figures.backward_seconds += end - start
        self.figures.jobs += 1
        self._record("backward", start, end, job, batch, micro)
        if forward is None:
            return None
        self.figures.staleness = updates - forward[1]
        return forward[0]

    def skipped(self, job: int) -> None:
        """A job will not be backwarded."""
        self._forwards.pop(job, None)
        self.figures.jobs += 1

    def stepped(self, batch: int, start: float, end: float) -> None:
        """The optimizer steps that end a batch were taken; -1 where the batch is not known."""
        self.last_step = end - start
        self.figures.step_seconds += end - start
        self._record("step", start, end, -1, batch, 0)

    def computed(self, kind: str, batch: int, start: float, end: float) -> None:
        """A ``loss`` or an ``evaluate`` was computed."""
        self._record(kind, start, end, -1, batch, 0)

    def crossed(self, kind: str, packet: Any, peer: int, start: float, end: float) -> None:
        """A link was busy with a packet: ``encode``, ``send`` or ``receive``.

        Args:
            kind: What was done.
            packet: A :class:`~lightning_accept.pipeline.messages.Packet`.
            peer: Number of the stage at the other end.
            start: When it began.
            end: When it ended.
        """
        batch, micro = packet.meta.get("batch", -1), packet.meta.get("micro", 0)
        self.log.record(
            Event(kind, start, end, packet.job, batch, micro, packet.kind, peer, packet.nbytes, self._stage, self._term)
        )

    def stats(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return asdict(self.figures)

    def _record(self, kind: str, start: float, end: float, job: int, batch: int, micro: int) -> None:
        self.log.record(Event(kind, start, end, job, batch, micro, stage=self._stage, term=self._term))
