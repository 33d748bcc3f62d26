"""The central node's end of the pipeline, without Lightning."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, trace
from lightning_accept.partition.link import Speed
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.gather import restore_state
from lightning_accept.pipeline.messages import PipelineError, StageFault, StageState
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.pipeline.ticket import Ticket
from lightning_accept.remote.memory import MemoryCluster


class Bench:
    """A net of five layers on the central node and two workers."""

    def __init__(self, in_flight: int, micro_batches: int = 1) -> None:
        torch.manual_seed(2)
        self.cluster = MemoryCluster(2, build_stage)
        self.net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.trace = trace(self.net, (torch.randn(4, 3),), {})
        self.chain = Chain.from_trace(self.trace)
        self.schedule = default_schedule(2, in_flight, micro_batches)
        self.pipeline = CentralPipeline(
            self.cluster.workers,
            Settings(Raw(), Raw(), Raw(), weight_prediction=False, seed=0),
            device=torch.device("cpu"),
            timeout=30.0,
            batch_timeout=30.0,
        )

    def deploy(self) -> None:
        self.pipeline.deploy(self.trace, self.chain, [2, 4], self.schedule, [self.optimizer])

    def update(self) -> list[Any]:
        return [[0, [{"lr": 0.1}]]]

    def train(self, ticket: Ticket, update: bool = True) -> Tensor:
        (output,) = self.pipeline.output(ticket)
        self.pipeline.backward(ticket, [torch.ones_like(output)], self.update() if update else None)
        return output

    def gather(self) -> None:
        def restore(stage: int, state: StageState) -> None:
            restore_state(state, self.trace.parameters, self.trace.buffers, [self.optimizer])

        self.pipeline.gather(restore)


@pytest.fixture
def bench() -> Iterator[Any]:
    before = set(threading.enumerate())
    made: list[Bench] = []

    def make(in_flight: int = 4, micro_batches: int = 1, ready: bool = True) -> Bench:
        made.append(Bench(in_flight, micro_batches))
        if ready:
            made[-1].pipeline.connect("me")
            made[-1].deploy()
        return made[-1]

    yield make
    for item in made:
        item.pipeline.close()
        item.pipeline.close()
    assert not [thread.name for thread in set(threading.enumerate()) - before]


def batch(seed: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_output_is_the_modules(bench: Any, micro_batches: int) -> None:
    b = bench(2, micro_batches)
    ticket = b.pipeline.begin([batch(0)])
    b.pipeline.flush()
    (output,) = b.pipeline.output(ticket)
    torch.testing.assert_close(output, b.net(batch(0)).detach())
    assert ticket.needs_grad == [True]
    assert len(ticket.jobs) == micro_batches
    b.pipeline.abandon()


def test_one_batch_after_another_is_plain_training(bench: Any) -> None:
    b = bench()
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    plain.load_state_dict(b.net.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        ticket = b.pipeline.begin([batch(number)])
        assert b.pipeline.in_flight == 1
        b.pipeline.flush()
        b.train(ticket)
        b.pipeline.settle()
        assert (ticket.completed, b.pipeline.in_flight) == (True, 0)
        optimizer.zero_grad()
        plain(batch(number)).sum().backward()
        optimizer.step()
    b.gather()
    torch.testing.assert_close(b.net.state_dict(), plain.state_dict())
    assert set(b.pipeline.reports) == {0, 1, 2}
    for report in b.pipeline.reports.values():
        assert report.forward > 0
        assert report.backward > 0
        assert report.step > 0


def test_links_are_measured_by_the_packets_themselves(bench: Any) -> None:
    b = bench()
    speeds = {
        (None, "memory://1"): 1e6,
        ("memory://1", "memory://2"): 2e6,
        ("memory://2", None): 3e6,
        (None, "memory://2"): 4e6,
        ("memory://2", "memory://1"): 5e6,
        ("memory://1", None): 6e6,
    }
    b.cluster.links = lambda source, target: Speed(speeds[source, target], 0.01)
    for number in range(4):
        ticket = b.pipeline.begin([batch(number, 2000)])
        b.pipeline.flush()
        b.train(ticket, update=False)
        b.pipeline.settle()
    found = [(b.pipeline.reports[stage].down, b.pipeline.reports[stage].up) for stage in range(3)]
    # What a worker sends to the central node is measured there.
    expected = [(1e6, 4e6), (2e6, None), (None, 5e6)]
    assert found == [tuple(x if x is None else pytest.approx(x) for x in pair) for pair in expected]
    assert {name: speed.bandwidth for name, speed in b.pipeline.received.items()} == pytest.approx(
        {"up": 6e6, "down": 3e6}
    )
    assert b.pipeline.stats()[1]["links"]["down"]["bandwidth"] == pytest.approx(2e6)
    b.deploy()
    assert b.pipeline.reports == {}
    assert b.pipeline.received == {"up": None, "down": None}


def test_a_batch_that_is_dropped_reports_nothing(bench: Any) -> None:
    b = bench()
    b.pipeline.begin([batch(0)])
    b.pipeline.abandon()
    assert b.pipeline.reports == {}


def test_batches_in_flight_are_completed_in_order_and_with_the_lag_that_is_allowed(bench: Any) -> None:
    b = bench()
    tickets = [b.pipeline.begin([batch(n)]) for n in range(3)]
    assert [ticket.batch for ticket in tickets] == [0, 1, 2]
    b.pipeline.flush()
    for ticket in tickets:
        b.train(ticket)
    b.pipeline.complete_lagging(2)
    assert [ticket.completed for ticket in tickets] == [True, False, False]
    with pytest.raises(PipelineError, match="drain the pipeline before a deployment"):
        b.deploy()
    b.pipeline.settle()
    assert b.pipeline.in_flight == 0


def test_abandoned_batches_leave_no_trace(bench: Any) -> None:
    b = bench()
    before = {name: p.detach().clone() for name, p in b.net.named_parameters()}
    for number in range(3):
        b.pipeline.begin([batch(number)])
    b.pipeline.abandon()
    assert b.pipeline.in_flight == 0
    b.gather()
    assert all(torch.equal(p, before[name]) for name, p in b.net.named_parameters())
    assert [stage.get("outstanding", 0) for stage in b.pipeline.stats()] == [0, 0, 0]


def test_a_new_deployment_carries_weights_and_gradients_that_wait_for_their_update(bench: Any) -> None:
    b = bench()
    b.pipeline.begin([batch(0)])
    b.pipeline.flush()
    b.train(b.pipeline._outstanding[0], update=False)
    b.gather()
    b.deploy()
    assert b.pipeline.term == 2
    b.train(b.pipeline.begin([batch(1)]))
    b.gather()
    plain = Bench(4).net
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in (0, 1):
        plain(batch(number)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(b.net.state_dict(), plain.state_dict())


def test_a_second_backward_is_refused(bench: Any) -> None:
    b = bench(1)
    ticket = b.pipeline.begin([batch(0)])
    b.train(ticket)
    with pytest.raises(PipelineError, match="backward was called twice through the pipelined call of batch 0"):
        b.pipeline.backward(ticket, [None], None)
    b.pipeline.settle()


def test_synchronous_mode_hands_over_gradients_and_steps_when_told(bench: Any) -> None:
    b = bench(1)
    ticket = b.pipeline.begin([batch(0).requires_grad_()], input_gradients=True)
    b.train(ticket, update=False)
    b.pipeline.complete(ticket)
    assert ticket.input_gradients[0] is not None
    assert set(b.pipeline.take_gradients()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    before = b.net[4].weight.detach().clone()
    b.pipeline.step(b.update())
    b.gather()
    middle = b.net[4].weight.detach().clone()
    assert not torch.equal(before, middle)
    b.pipeline.zero_gradients(0)
    b.pipeline.step(b.update())
    b.gather()
    assert torch.equal(b.net[4].weight, middle)


def test_evaluations_overlap_with_each_other_and_with_training(bench: Any) -> None:
    b = bench()
    ticket = b.pipeline.begin([batch(0)])
    numbers = [b.pipeline.evaluate([batch(n, count=2 + n)], training=False) for n in range(3)]
    for n in (2, 0, 1):
        (output,) = b.pipeline.evaluated(numbers[n])
        torch.testing.assert_close(output, b.net(batch(n, count=2 + n)).detach())
    b.pipeline.flush()
    b.train(ticket)
    b.pipeline.settle()


def test_an_error_in_stage_0_is_reported_like_any_other_stages(bench: Any) -> None:
    b = bench()
    with pytest.raises(
        StageFault, match=r"stage 0 \(0, 1\) on central node failed in the forward of batch 0: RuntimeErr"
    ):
        b.pipeline.begin([torch.ones(4, 9)])
    with pytest.raises(StageFault, match="on central node failed in the forward of evaluation batch 0"):
        b.pipeline.evaluate([torch.ones(4, 9)], training=False)


def test_all_workers_are_claimed_or_none(bench: Any) -> None:
    b = bench(ready=False)
    b.cluster.workers[1].claim("other", "somebody", "link")
    with pytest.raises(PipelineError, match="held by somebody"):
        b.pipeline.connect("me")
    b.cluster.workers[0].claim("third", "anybody", "link")


def test_nothing_works_before_a_deployment_or_after_the_end(bench: Any) -> None:
    b = bench(ready=False)
    assert not b.pipeline.deployed
    b.pipeline.connect("me")
    b.pipeline.settle()
    with pytest.raises(PipelineError, match="no stages are deployed"):
        b.pipeline.begin([batch(0)])
    b.pipeline.close()
    assert b.pipeline.failed
    with pytest.raises(PipelineError, match="the pipeline is closed"):
        b.pipeline.begin([batch(0)])


def test_a_pipeline_needs_a_worker() -> None:
    settings = Settings(Raw(), Raw(), Raw(), weight_prediction=False, seed=0)
    with pytest.raises(ValueError, match="at least one worker"):
        CentralPipeline([], settings, device=torch.device("cpu"), timeout=1.0, batch_timeout=1.0)
