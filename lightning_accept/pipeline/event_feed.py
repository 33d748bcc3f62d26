"""EventFeed: fetches the events of all stages, and puts them on one clock."""

from __future__ import annotations

import threading
import time

from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.clocks import ClockAlignment
from lightning_accept.pipeline.events import Event
from lightning_accept.pipeline.transport import WorkerHandle


class EventFeed:
    """The events of all stages from now on, each handed out once, on the central node's clock.

    Args:
        pipeline: The pipeline. Before it replaces stages, their last events are fetched, for they go with the stages.
    """

    def __init__(self, pipeline: CentralPipeline) -> None:
        self._log = pipeline.events
        self._workers = list(pipeline.claimed)
        self._began = time.perf_counter()
        self._last = self._log.since(0)[1]
        self._lasts: dict[str, tuple[int, int]] = {}
        self._clocks = {worker.name: ClockAlignment() for worker in self._workers}
        self._held: list[Event] = []
        self._lock = threading.Lock()
        pipeline.before_term.append(self._hold)

    def poll(self) -> list[Event]:
        """All events since the last call, of every stage, by their start.

        Every worker is asked over the network.

        Raises:
            PipelineError: If a worker does not answer.
        """
        with self._lock:
            self._fetch()
            events, self._held = self._held, []
        return sorted(events, key=lambda event: event.start)

    def read_clocks(self) -> None:
        """Ask for the workers' clocks. It is most exact while nothing else travels."""
        self._hold()

    def clock_errors(self) -> dict[str, float]:
        """For every worker, the most seconds by which its newest events may be displaced."""
        with self._lock:
            known = {name: (clock, clock.latest) for name, clock in self._clocks.items()}
            return {name: clock.error(latest) for name, (clock, latest) in known.items() if latest is not None}

    def _hold(self) -> None:
        with self._lock:
            self._fetch()

    def _fetch(self) -> None:
        own, self._last = self._log.since(self._last)
        self._held += own
        for worker in self._workers:
            self._held += self._events_of(worker)

    def _events_of(self, worker: WorkerHandle) -> list[Event]:
        reply = worker.events(*self._lasts.get(worker.name, (0, 0)))
        clock = self._clocks[worker.name]
        clock.add(reply.sent, reply.now, reply.received)
        self._lasts[worker.name] = (reply.term, reply.last)
        starts = [clock.here(event.start) for event in reply.events]
        moved = [
            event._replace(start=start, end=start + event.seconds)
            for event, start in zip(reply.events, starts, strict=True)
        ]
        return [event for event in moved if event.end >= self._began]
