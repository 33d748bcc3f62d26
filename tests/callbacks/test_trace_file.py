"""TraceFile: what Perfetto and Chrome can read, at every moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_accept.callbacks.trace_file import TraceFile
from lightning_accept.pipeline.events import Event

EVENTS = [
    Event("forward", 10.0, 10.5, 0, 0, stage=0, term=1),
    Event("encode", 10.5, 10.6, 0, 0, 0, "forward", 1, 100, 0, 1),
    Event("send", 10.6, 11.0, 0, 0, 0, "forward", 1, 100, 0, 1),
    Event("receive", 11.0, 11.5, 0, 0, 0, "backward", 1, 200, 0, 1),
    Event("step", 11.5, 11.75, -1, 0, stage=0, term=1),
]


def test_events_as_the_format_wants_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    trace = TraceFile(path, began=10.0)
    trace.name_stages(["central node", "http://pi-1:7070"])
    trace.name_stages(["central node", "http://pi-1:7070"])
    trace.add(EVENTS[:2])
    trace.add(EVENTS[2:])
    trace.close()
    trace.close()
    entries = json.loads(path.read_text())["traceEvents"]
    names = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert names == ["central node", "http://pi-1:7070"]
    shown = [entry for entry in entries if entry["ph"] == "X"]
    assert [(entry["name"], entry["ts"], entry["dur"], entry["pid"]) for entry in shown] == [
        ("forward 0", 0.0, 5e5, 0),
        ("forward 0", 6e5, 4e5, 0),
        ("backward 0", 1e6, 5e5, 1),
        ("step 0", 1.5e6, 2.5e5, 0),
    ]
    assert shown[1]["args"] == {"job": 0, "batch": 0, "micro": 0, "bytes": 100, "term": 1}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert {threads[entry["pid"], entry["tid"]] for entry in shown} == {
        "compute",
        "activations to stage 1",
        "gradients to stage 0",
    }


def test_a_file_that_was_never_closed_lacks_its_end_only(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", began=10.0)
    trace.add(EVENTS)
    text = (tmp_path / "trace.json").read_text()
    trace.close()
    assert len(json.loads(text + "]}")["traceEvents"]) > len(EVENTS) - 2


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        TraceFile(tmp_path, began=0.0)
