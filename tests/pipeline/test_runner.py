"""A worker's stage between its neighbours."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.codecs import Payload, Raw, decode
from lightning_accept.graph import Chain, trace
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline.deploy import Settings, make_deployments
from lightning_accept.pipeline.messages import (
    Packet,
    QueueFull,
    StageFault,
    Transfer,
    WrongTerm,
    reports_in,
)
from lightning_accept.pipeline.placement import Target
from lightning_accept.pipeline.runner import StageRunner, build_stage


class Link:
    overlaps = False

    def __init__(self) -> None:
        self.packets: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.transfer: Transfer | None = None

    def send(self, packet: Packet, on_left: Any = None) -> Transfer | None:
        self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.packets.put(packet)
        return self.transfer

    def close(self) -> None:
        self.gate.set()

    def next(self) -> Packet:
        return self.packets.get(timeout=30)


class Bench:
    """One worker's stage, the middle one of three."""

    def __init__(self, window: int | None = 2, micro_batches: int = 1) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        traced = trace(self.net, (torch.randn(4, 3),), {})
        chain = Chain.from_trace(traced)
        schedule = Schedule(1, (1, 1), 0) if window is None else Schedule(4, (window, 1), 1, micro_batches)
        workers: Any = [SimpleNamespace(address=None), SimpleNamespace(address="next")]
        settings = Settings(Raw(), Raw(), Raw(), weight_prediction=False, seed=0)
        deployment = make_deployments(
            Target(traced, chain, [1, 2], schedule, [self.optimizer], workers),
            settings,
            gradients={},
            run="run",
            term=1,
            link_token="t",
        )[0]
        self.up, self.down = Link(), Link()
        # As a network does: what arrives is a copy.
        for name, tensor in deployment.tensors.items():
            deployment.tensors[name] = tensor.clone()
        self.runner = build_stage(
            deployment, device=torch.device("cpu"), upstream=self.up, downstream=self.down, where="here"
        )

    def packet(self, kind: Any, job: int = 0, tensors: Any = None, term: int = 1, **meta: Any) -> Packet:
        if kind == "forward":
            meta = {"batch": job, "micro": 0, "updates": True, "needs_grad": [True], **meta}
            tensors = [activation(job)] if tensors is None else tensors
        elif kind == "backward":
            meta = {"batch": job, **meta}
            tensors = [torch.ones(4, 3)] if tensors is None else tensors
        elif kind == "evaluate":
            meta = {"training": False, **meta}
            tensors = [activation(job)] if tensors is None else tensors
        payloads = tuple(None if t is None else Raw().encode(t) for t in tensors or ())
        return Packet(kind, "run", term, job, meta, payloads)

    def deliver(self, kind: Any, job: int = 0, *arguments: Any, **meta: Any) -> None:
        self.runner.deliver(self.packet(kind, job, *arguments, **meta))

    def update(self) -> list[Any]:
        return [[0, [{"lr": 0.1}]]]


def activation(job: int) -> Tensor:
    return torch.full((4, 3), float(job + 1))


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(start: bool = True, **options: Any) -> Bench:
        made.append(Bench(**options))
        if start:
            made[-1].runner.start()
        return made[-1]

    yield make
    for item in made:
        item.runner.close()
        item.runner.close()
        assert not item.runner._thread.is_alive()


def test_forward_and_backward_pass_through(bench: Any) -> None:
    b = bench()
    b.deliver("forward", 0, epoch=2)
    out = b.down.next()
    x = activation(0).requires_grad_()
    expected = b.net[1](x)
    assert torch.equal(decode(out.payloads[0]), expected.detach())
    assert (out.kind, out.job, out.meta["needs_grad"], out.meta["epoch"]) == ("forward", 0, [True], 2)
    b.deliver("flush", 1)
    b.deliver("backward", 0, times={"2": [0.5, 0.5]}, update=b.update())
    back = b.up.next()
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(decode(back.payloads[0]), gradient)
    assert set(back.meta["times"]) == {"1", "2"}
    assert b.down.next().kind == "flush"
    state = b.runner.state(30.0)
    torch.testing.assert_close(state.tensors["param/1.bias"], b.net[1].bias.detach() - 0.1 * 4)


def test_every_gradient_carries_the_stages_report(bench: Any) -> None:
    b = bench(window=None)
    b.down.transfer = Transfer(100_000, 0.82, 0.02)
    b.up.transfer = Transfer(100_000, 1.62, 0.02)
    reports = []
    for job in range(3):
        b.deliver("forward", job)
        b.down.next()
        b.deliver("backward", job, update=b.update())
        reports.append(reports_in(b.up.next().meta)[1])
        b.runner.state(30.0)
    assert all(report.forward > 0 and report.backward > 0 for report in reports)
    assert reports[0].step == 0.0
    assert all(report.step > 0 for report in reports[1:])
    assert reports[2].down == pytest.approx(1e6)
    assert reports[2].up == pytest.approx(5e5)
    assert b.runner.stats()["links"]["down"]["bandwidth"] == pytest.approx(1e6)


def test_a_skipped_job_reports_nothing(bench: Any) -> None:
    b = bench(window=None)
    b.deliver("forward", 0)
    b.deliver("backward", 0, [], skip=True)
    assert "times" not in b.up.next().meta


def test_order_is_the_schedules_whatever_arrives_first(bench: Any) -> None:
    b = bench(window=2)
    for job in (3, 1, 2):
        b.deliver("forward", job)
    b.deliver("backward", 0)
    assert b.down.packets.empty()
    b.deliver("forward", 0)
    assert [b.down.next().job for _ in range(3)] == [0, 1, 2]
    assert b.up.next().job == 0
    b.runner.state(30.0)  # job 3 waits for the backward of job 1
    assert b.down.packets.empty()
    b.deliver("backward", 1)
    assert b.down.next().job == 3


def test_duplicates_are_ignored(bench: Any) -> None:
    b = bench()
    for _ in range(3):
        b.deliver("forward", 0)
        b.deliver("evaluate", 0)
        b.deliver("flush", 1)
    b.deliver("backward", 0)
    b.deliver("backward", 0)
    assert sorted(b.down.next().kind for _ in range(3)) == ["evaluate", "flush", "forward"]
    b.up.next()
    b.runner.state(30.0)
    assert b.down.packets.empty()
    assert b.up.packets.empty()
    assert b.runner.stats()["jobs"] == 1


def test_another_run_or_term_is_refused(bench: Any) -> None:
    b = bench()
    with pytest.raises(WrongTerm, match="serves run run in term 1, not run run in term 2"):
        b.runner.deliver(b.packet("forward", term=2))
    b.runner.close()
    with pytest.raises(WrongTerm, match="stage 1 on here is closed"):
        b.deliver("forward")


def test_a_full_queue_is_back_pressure_for_forwards_only(bench: Any) -> None:
    b = bench(start=False)
    limit = b.runner._queue_limit
    for job in range(limit):
        b.deliver("forward", job)
    for kind in ("forward", "evaluate"):
        with pytest.raises(QueueFull):
            b.deliver(kind, limit)
    b.deliver("forward", 0)  # a repetition is no new packet
    b.deliver("backward", 0)
    b.runner.start()
    b.down.next()
    b.runner.state(30.0)
    b.deliver("forward", limit)  # what was refused can come again


def test_what_comes_next_is_taken_though_later_packets_have_filled_the_queue(bench: Any) -> None:
    b = bench(start=False)
    for job in range(1, b.runner._queue_limit + 1):
        b.deliver("forward", job)
    b.deliver("forward", 0)
    b.runner.start()
    assert [b.down.next().job for _ in range(2)] == [0, 1]


def test_evaluation_uses_the_newest_weights_between_training_jobs(bench: Any) -> None:
    b = bench()
    b.deliver("forward", 0)
    b.down.next()
    b.deliver("evaluate", 0)
    out = b.down.next()
    assert out.kind == "evaluate"
    assert torch.equal(decode(out.payloads[0]), b.net[1](activation(0)).detach())


def test_skipped_and_empty_jobs_go_their_way_without_work(bench: Any) -> None:
    b = bench()
    b.deliver("forward", 0)
    b.deliver("forward", 1, [], empty=True)
    assert [b.down.next().meta.get("empty", False) for _ in range(2)] == [False, True]
    b.deliver("flush", 2)
    b.deliver("backward", 0, [], skip=True)
    b.deliver("backward", 1, [], empty=True, update=b.update())
    assert [len(b.up.next().payloads) for _ in range(2)] == [0, 0]
    stats = b.runner.stats()
    assert (stats["jobs"], stats["outstanding"]) == (2, 0)


def test_synchronous_stages_work_as_packets_arrive_and_step_when_told(bench: Any) -> None:
    b = bench(window=None)
    for job in (0, 1):
        b.deliver("forward", job)
    b.deliver("backward", 1)
    b.deliver("backward", 0)
    assert [b.up.next().job for _ in range(2)] == [1, 0]
    before = b.runner.state(30.0).tensors
    assert {"grad/1.weight", "grad/1.bias"} <= set(before)
    b.deliver("step", 0, update=b.update())
    after = b.runner.state(30.0).tensors
    torch.testing.assert_close(after["param/1.bias"], before["param/1.bias"] - 0.1 * 8)
    b.deliver("step", 1, update=b.update(), zero=[0])
    assert torch.equal(b.runner.state(30.0).tensors["param/1.bias"], after["param/1.bias"])


def test_a_fault_names_stage_layers_place_and_work_and_ends_all(bench: Any) -> None:
    b = bench()
    b.deliver("forward", 0, [torch.ones(4, 9)])
    with pytest.raises((StageFault, TimeoutError)):
        b.runner.state(30.0)
    b.runner._thread.join(30)
    fault = b.runner.fault
    assert fault is not None
    assert (fault.stage, fault.layers, fault.where, fault.doing) == (1, ("1",), "here", "forward of batch 0")
    assert "shapes cannot be multiplied" in fault.error
    assert "Traceback" in fault.traceback
    for action in (lambda: b.deliver("forward", 1), lambda: b.runner.state(1.0)):
        with pytest.raises(StageFault):
            action()


def test_a_neighbour_that_is_gone_is_a_fault(bench: Any) -> None:
    b = bench()
    b.down.error = ConnectionError("gone")
    b.deliver("forward", 0)
    b.runner._thread.join(30)
    assert b.runner.fault is not None
    assert b.runner.fault.doing == "sending of forward of batch 0 over the link from stage 1 to stage 2"
    assert b.runner.fault.error == "ConnectionError: gone"


def test_a_packet_that_cannot_be_decoded_is_refused_without_harm(bench: Any) -> None:
    b = bench()
    bad = Packet("forward", "run", 1, 0, {"batch": 0}, (Payload({}, {"codec": "unheard-of"}),))
    with pytest.raises(ValueError, match="stage 1: forward of batch 0 from the previous stage cannot be decoded"):
        b.runner.deliver(bad)
    b.deliver("forward", 0)
    assert b.down.next().job == 0
    assert b.runner.fault is None


def test_a_missing_activation_is_a_fault(bench: Any) -> None:
    b = bench()
    b.deliver("forward", 0, [None])
    b.runner._thread.join(30)
    assert b.runner.fault is not None
    assert "an activation is missing in the packet" in b.runner.fault.error


def test_a_state_that_does_not_come_in_time(bench: Any) -> None:
    b = bench(start=False)
    with pytest.raises(TimeoutError, match="stage 1 on here did not gather its state within 0 s"):
        b.runner.state(0.0)


def test_an_unstarted_runner_can_be_closed() -> None:
    runner: StageRunner = Bench().runner
    runner.close()
