"""StageRecorder: figures and events of the same work agree."""

from __future__ import annotations

from lightning_accept.pipeline.events import Event, EventLog
from lightning_accept.pipeline.messages import Packet
from lightning_accept.pipeline.recorder import StageRecorder


def test_a_job_from_forward_to_update() -> None:
    log = EventLog()
    recorder = StageRecorder(log, stage=1, term=4)
    recorder.forwarded(7, 3, 1, 1.0, 1.5, updates=2)
    assert recorder.backwarded(7, 3, 1, 2.0, 3.0, updates=5) == 0.5
    recorder.stepped(3, 3.0, 3.25)
    assert recorder.stats() == {
        "forward_seconds": 0.5,
        "backward_seconds": 1.0,
        "step_seconds": 0.25,
        "waiting_seconds": 0.0,
        "jobs": 1,
        "staleness": 3,
    }
    assert recorder.last_step == 0.25
    assert log.since(0)[0] == [
        Event("forward", 1.0, 1.5, 7, 3, 1, stage=1, term=4),
        Event("backward", 2.0, 3.0, 7, 3, 1, stage=1, term=4),
        Event("step", 3.0, 3.25, -1, 3, stage=1, term=4),
    ]


def test_an_empty_micro_batch_has_no_forward() -> None:
    assert StageRecorder(EventLog(), 1, 1).backwarded(0, 0, 3, 1.0, 2.0, updates=0) is None


def test_a_skipped_job_is_forgotten() -> None:
    recorder = StageRecorder(EventLog(), 1, 1)
    recorder.forwarded(0, 0, 0, 1.0, 2.0, updates=0)
    recorder.skipped(0)
    assert recorder.backwarded(0, 0, 0, 3.0, 4.0, updates=0) is None


def test_a_link() -> None:
    log = EventLog()
    packet = Packet("backward", "run", 4, 7, {"batch": 3, "micro": 1})
    StageRecorder(log, 1, 4).crossed("send", packet, 0, 1.0, 2.0)
    assert log.since(0)[0] == [Event("send", 1.0, 2.0, 7, 3, 1, "backward", 0, 0, 1, 4)]
