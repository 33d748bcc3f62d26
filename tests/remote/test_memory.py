"""The in-memory transport keeps the contracts of the one over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_accept.latency.profile import Profile
from lightning_accept.latency.submodels import Measurement
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.messages import Fault, PipelineError, QueueFull, StageFault, TransportError, WrongTerm
from lightning_accept.remote.disturb import Disturbance, RandomDisturbance
from lightning_accept.remote.memory import MemoryCluster


@pytest.fixture
def cluster(echo_stage: Any) -> Iterator[Callable[..., MemoryCluster]]:
    clusters: list[MemoryCluster] = []

    def make(count: int = 2, disturb: Any = None, **options: Any) -> MemoryCluster:
        clusters.append(MemoryCluster(count, echo_stage, disturb, **options))
        return clusters[-1]

    yield make
    for made in clusters:
        made.close()


def deploy_chain(cluster: MemoryCluster, deployment: Any, term: int = 1, **changes: Any) -> list[Any]:
    for worker in cluster.workers:
        worker.claim("run-1", "me", "link")
    first, last = cluster.workers
    last.deploy(deployment(term=term, stage=2, stages=3, upstream=first.address, **changes))
    first.deploy(deployment(term=term, stage=1, stages=3, downstream=last.address, **changes))
    return [worker._host for worker in cluster.workers]


@pytest.mark.parametrize("through_wire", [False, True])
def test_packets_go_down_and_up(cluster: Any, deployment: Any, packet: Any, through_wire: bool) -> None:
    made = cluster(through_wire=through_wire)
    deploy_chain(made, deployment)
    first, last = made.workers
    assert [worker.address for worker in made.workers] == ["memory://1", "memory://2"]
    for job in range(10):
        first.send(packet(job))
        last.send(packet(job, kind="backward"))
    for job in range(10):
        assert last.receive("down", 30.0).job == job
        assert first.receive("up", 30.0).job == job
    assert last.receive("down", 0.0) is None
    assert first.stats() == {"jobs": 20}
    assert [event.job for event in first.events(1, 18).events] == [18, 19]
    assert first.state(1.0).spec == {"taken": 20}


def test_through_the_wire_nothing_is_shared(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster()
    weight = torch.zeros(2)
    stages = deploy_chain(made, deployment, tensors={"weight": weight})
    sent = packet(1)
    made.workers[0].send(sent)
    received = made.workers[1].receive("down", 30.0)
    received.payloads[0].tensors["data"].zero_()
    stages[0].deployment.tensors["weight"].fill_(1.0)
    assert sent.payloads[0].tensors["data"].tolist() == [1.0] * 4
    assert weight.tolist() == [0.0, 0.0]


def test_each_packet_once_and_in_order_whatever_happens(cluster: Any, deployment: Any, packet: Any) -> None:
    disturb = RandomDisturbance(1, max_delay=0.002, loss=0.3, duplicate=0.4)
    made = cluster(disturb=disturb)
    stages = deploy_chain(made, deployment)
    first, last = made.workers
    sender = threading.Thread(target=lambda: [first.send(packet(job)) for job in range(60)])
    sender.start()
    assert [last.receive("down", 30.0).job for _ in range(60)] == list(range(60))
    sender.join()
    assert [taken.job for taken in stages[0].taken] == list(range(60))


def test_late_duplicates_arrive_after_the_next_packet(
    cluster: Any, deployment: Any, packet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster(disturb=lambda packet: Disturbance(duplicates=1, late=packet.job == 0))
    stage, _ = deploy_chain(made, deployment)
    arrivals: list[int] = []
    deliver = stage.deliver
    monkeypatch.setattr(stage, "deliver", lambda packet: (arrivals.append(packet.job), deliver(packet)))
    for job in range(3):
        made.workers[0].send(packet(job))
    assert arrivals == [0, 1, 0, 1, 2, 2]


def test_back_pressure_is_waited_out_until_the_deadline(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster(timeout=0.1)
    stage, _ = deploy_chain(made, deployment)
    stage.refusals = [QueueFull(0.01)]
    made.workers[0].send(packet(0))
    stage.refusals = [QueueFull(0.01)] * 1000
    with pytest.raises(TransportError, match=r"memory://1 did not take the forward of job 1 within 0.1 s"):
        made.workers[0].send(packet(1))


def test_refusals(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster()
    worker = made.workers[0]
    worker.claim("run-1", "me", "link")
    worker.claim("run-1", "me", "link")
    with pytest.raises(PipelineError, match=r"busy: held by me \(run run-1\)"):
        worker.claim("run-2", "you", "link")
    with pytest.raises(WrongTerm):
        worker.send(packet())
    with pytest.raises(PipelineError, match="refused stage 1: no such op"):
        worker.deploy(deployment(spec={"refuse": "no such op"}))
    with pytest.raises(StageFault, match="KeyError"):
        worker.deploy(deployment(spec={"break": "oops"}))
    worker.deploy(deployment(term=2, spec={"slow": True}))
    with pytest.raises(WrongTerm):
        worker.deploy(deployment(term=1))
    with pytest.raises(TransportError, match="the stage is slow"):
        worker.state(0.0)
    with pytest.raises(PipelineError, match="no worker memory://9"):
        made.worker_at("memory://9")


def test_links_are_infinitely_fast_unless_a_table_says_otherwise(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster()
    deploy_chain(made, deployment)
    first, second = made.workers
    assert first.measure_link(1.0) == (Speed(), Speed())
    assert first.measure_link_to(second.address, 1.0) == Speed()
    assert first.send(packet()) is None
    assert second.receive("down", 30.0).transfer is None


def test_the_table_of_links(cluster: Any, deployment: Any, packet: Any) -> None:
    numbers = {None: 0, "memory://1": 1, "memory://2": 2}
    made = cluster(links=lambda source, target: Speed(1e6 * (10 * numbers[source] + numbers[target] + 1), 0.25))
    deploy_chain(made, deployment)
    first, second = made.workers
    assert second.measure_link(1.0) == (Speed(3e6, 0.25), Speed(21e6, 0.25))
    assert first.measure_link_to(second.address, 1.0) == Speed(13e6, 0.25)
    with pytest.raises(PipelineError, match="no worker memory://9"):
        first.measure_link_to("memory://9", 1.0)
    sent = first.send(packet(size=1000))
    assert (sent.nbytes, sent.round_trip) == (4000, 0.5)
    assert sent.seconds == pytest.approx(8 * 4000 / 2e6 + 0.5)
    received = second.receive("down", 30.0).transfer
    assert received.seconds - received.round_trip == pytest.approx(8 * 4000 / 21e6)


@pytest.mark.parametrize("through_wire", [False, True])
def test_a_profile_is_measured_or_made_up(cluster: Any, profile_request: Any, through_wire: bool) -> None:
    made = cluster(through_wire=through_wire)
    for worker in made.workers:
        worker.claim("run-1", "me", "link")
    measured = made.workers[0].profile(profile_request, 300.0).measured
    assert [one.span for one in measured] == list(profile_request.spans)
    asked: list[Any] = []

    def profiler(address: str, request: Any) -> Profile:
        asked.append((address, request.spans))
        return Profile((Measurement(0, 1, 1.0, 2.0),))

    made.profiler = profiler
    assert made.workers[1].profile(profile_request, 300.0).measured == (Measurement(0, 1, 1.0, 2.0),)
    assert asked == [("memory://2", profile_request.spans)]


def test_a_profile_has_a_deadline_and_ends_with_the_call(cluster: Any, profile_request: Any) -> None:
    worker = cluster().workers[0]
    worker.claim("run-1", "me", "link")
    with pytest.raises(TransportError, match="memory://1, the profile request"):
        worker.profile(profile_request, -1.0)
    worker.close()
    with pytest.raises(TransportError, match="interrupted"):
        worker.profile(profile_request, 300.0)


def test_a_fault_is_found_by_polling_and_by_sending(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster()
    stage, _ = deploy_chain(made, deployment)
    assert made.workers[0].poll(0.0) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(made.workers[0].poll(30.0)))
    thread.start()
    stage.fault = Fault(1, (), "memory://1", "forward of batch 0", "ValueError: no", "trace")
    thread.join(30)
    assert found == [stage.fault]
    with pytest.raises(StageFault):
        made.workers[0].send(packet())


def test_a_vanished_worker_is_a_transport_error_for_all(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster()
    stages = deploy_chain(made, deployment)
    made.workers[1].unreachable = True
    with pytest.raises(TransportError, match="memory://2 could not be reached"):
        made.workers[1].poll(0.0)
    made.workers[0].send(packet())
    while made.workers[0].poll(30.0) is None:
        pass
    assert "memory://2 could not be reached" in stages[0].fault.error
    made.workers[1].release()


def test_close_interrupts_and_release_makes_room_for_the_next_run(cluster: Any, deployment: Any) -> None:
    made = cluster()
    stages = deploy_chain(made, deployment)
    errors: list[Exception] = []

    def receive() -> None:
        try:
            made.workers[1].receive("down", 300.0)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    for worker in made.workers:
        worker.close()
    thread.join(30)
    assert len(errors) == 1
    for worker in made.workers:
        worker.release()
        worker.release()
    assert all(stage.closed.is_set() for stage in stages)
    for worker in made.workers:
        worker.claim("run-2", "you", "link")


def test_receiving_goes_on_across_terms(cluster: Any, deployment: Any, packet: Any) -> None:
    made = cluster()
    deploy_chain(made, deployment)
    made.workers[0].send(packet(0))
    assert made.workers[1].receive("down", 30.0).term == 1
    deploy_chain(made, deployment, term=2)
    made.workers[0].send(packet(0, term=2))
    assert made.workers[1].receive("down", 30.0).term == 2
