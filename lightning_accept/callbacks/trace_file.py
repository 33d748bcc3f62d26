"""TraceFile: a pipeline's events in the Trace Event Format, which Perfetto and Chrome show."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_accept.pipeline.events import Event
from lightning_accept.pipeline.timeline import COMPUTED, link_of

_COMPUTE = 0


class TraceFile:
    """Writes events as they come; a file that was never closed can be read too, up to where it ends.

    Every stage is a process with a thread that computes and one for each way of its links.

    Args:
        path: The file, replaced if there is one.
        began: The time that the trace calls 0, in seconds.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], began: float) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        self._began = began
        self._names: dict[int, str] = {}
        self._threads: set[tuple[int, int]] = set()
        self._first = True

    def name_stages(self, names: Iterable[str]) -> None:
        """Say where the stages are, in the order of their numbers."""
        for stage, name in enumerate(names):
            if self._names.get(stage) != name:
                self._names[stage] = name
                self._write({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": name}})
                self._write({"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}})

    def add(self, events: Iterable[Event]) -> None:
        """Write events, whose times are on the central node's clock."""
        for event in events:
            way = link_of(event)
            if event.kind in COMPUTED:
                thread, title = _COMPUTE, "compute"
            elif way is not None:
                # A way is shown with the stage that it leaves.
                thread = 1 + 2 * way[1] + (way[2] == "up")
                title = f"{'activations' if way[2] == 'down' else 'gradients'} to stage {way[1]}"
            else:
                continue
            stage = event.stage if way is None else way[0]
            if (stage, thread) not in self._threads:
                self._threads.add((stage, thread))
                self._write({"ph": "M", "name": "thread_name", "pid": stage, "tid": thread, "args": {"name": title}})
            what = event.carries or event.kind
            self._write(
                {
                    "ph": "X",
                    "name": what if event.batch < 0 else f"{what} {event.batch}",
                    "cat": event.kind,
                    "ts": round(1e6 * (event.start - self._began), 1),
                    "dur": round(1e6 * event.seconds, 1),
                    "pid": stage,
                    "tid": thread,
                    "args": _arguments(event),
                }
            )
        self._file.flush()

    def close(self) -> None:
        """End the file. Idempotent."""
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write("\n" if self._first else ",\n")
        self._first = False
        json.dump(entry, self._file, separators=(",", ":"))


def _arguments(event: Event) -> dict[str, int]:
    known = {"job": event.job, "batch": event.batch, "micro": event.micro, "bytes": event.nbytes, "term": event.term}
    return {name: value for name, value in known.items() if value >= 0}
