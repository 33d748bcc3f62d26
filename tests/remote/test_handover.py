"""Workers take layers over from each other, over HTTP and in memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accept.pipeline.messages import (
    Deployment,
    Fault,
    PipelineError,
    Sources,
    SourceUnreachable,
    StageFault,
    StageState,
    TransportError,
    WrongTerm,
)
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.handover import Kept, take_over
from lightning_accept.remote.memory import MemoryCluster


def state(*names: str, fill: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full((4,), fill) for name in names}


class Pair:
    """Two claimed workers, and how to give them stages."""

    def __init__(self, workers: list[Any], stages: Callable[[int], Any], deployment: Callable[..., Deployment]) -> None:
        self.first, self.second = workers
        self.stages = stages
        self._deployment = deployment

    def deploy(self, worker: Any, term: int, tensors: dict[str, Tensor], sources: dict[str, list[str]] | None) -> int:
        stage = 1 + (worker is self.second)
        known = None if sources is None else Sources(term - 1, sources)
        fetched: int = worker.deploy(
            self._deployment(
                term=term, stage=stage, stages=3, tensors=tensors, sources=known, spec={"optimizer_state": []}
            )
        )
        return fetched


@pytest.fixture(params=["memory", "http"])
def pair(request: Any, start_worker: Any, echo_stage: Any, deployment: Any) -> Iterator[Pair]:
    if request.param == "memory":
        cluster = MemoryCluster(2, echo_stage)
        made = Pair(cluster.workers, lambda number: cluster.workers[number]._host, deployment)
    else:
        servers = [start_worker(link_timeout=0.3) for _ in range(2)]
        workers = [HttpWorker(server.url, "secret", timeout=30.0) for server in servers]
        made = Pair(workers, lambda number: servers[number].stages[-1], deployment)
    for worker in (made.first, made.second):
        worker.claim("run-1", "me", "link")
    yield made
    for worker in (made.first, made.second):
        worker.close()
        worker.release()


def test_layers_come_from_the_other_worker_from_the_own_stage_and_from_the_central_node(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a", "param/b", "optim/0/m/b", "grad/b", "buffer/c", fill=1.0), None)
    pair.deploy(second, 1, state("param/d", fill=2.0), None)
    sources = {first.address: ["param/b", "buffer/c"], "": ["param/d"]}
    fetched = pair.deploy(second, 2, state("param/e", fill=3.0), sources)
    assert fetched == 4 * 4 * 4
    found = pair.stages(1).deployment.tensors
    assert {name: tensor[0].item() for name, tensor in found.items()} == {
        **{"param/b": 1.0, "optim/0/m/b": 1.0, "grad/b": 1.0, "buffer/c": 1.0},
        **{"param/d": 2.0, "param/e": 3.0},
    }
    assert pair.deploy(first, 2, {}, {"": ["param/a"]}) == 0
    assert set(pair.stages(0).deployment.tensors) == {"param/a"}


def test_two_workers_that_exchange_layers_do_not_wait_for_each_other(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a", fill=1.0), None)
    pair.deploy(second, 1, state("param/b", fill=2.0), None)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(pair.deploy, first, 2, {}, {second.address: ["param/b"]})
        theirs = pool.submit(pair.deploy, second, 2, {}, {first.address: ["param/a"]})
        assert (ours.result(60), theirs.result(60)) == (16, 16)
    assert pair.stages(0).deployment.tensors["param/b"][0] == 2.0
    assert pair.stages(1).deployment.tensors["param/a"][0] == 1.0


def test_what_was_kept_is_there_until_it_is_to_be_forgotten(pair: Pair) -> None:
    first = pair.first
    pair.deploy(first, 1, state("param/a"), None)
    assert set(first.handover(1, ["param/a"], 30.0).tensors) == {"param/a"}
    pair.deploy(first, 2, state("param/b"), {})
    for _ in range(2):
        assert set(first.handover(1, ["param/a"], 30.0).tensors) == {"param/a"}
    assert set(first.handover(2, ["param/b"], 30.0).tensors) == {"param/b"}
    first.forget(2)
    with pytest.raises(WrongTerm, match="no stage of term 1 to hand layers over from"):
        first.handover(1, ["param/a"], 30.0)
    first.forget(2)
    assert first.stats() == {"jobs": 0}
    first.forget(3)
    assert first.stats() == {}
    with pytest.raises(WrongTerm):
        first.handover(2, ["param/b"], 30.0)


def test_a_plain_deployment_keeps_nothing(pair: Pair) -> None:
    pair.deploy(pair.first, 1, state("param/a"), None)
    pair.deploy(pair.first, 2, state("param/b"), {})
    pair.deploy(pair.first, 3, state("param/c"), None)
    for term in (1, 2):
        with pytest.raises(WrongTerm):
            pair.first.handover(term, [], 30.0)


def test_a_worker_that_was_left_out_comes_back(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a"), None)
    pair.deploy(second, 1, state("param/b"), None)
    pair.deploy(second, 2, {}, {"": ["param/b"], first.address: ["param/a"]})
    first.forget(2)
    second.forget(2)
    pair.deploy(second, 3, {}, {"": ["param/b"]})
    pair.deploy(first, 3, {}, {second.address: ["param/a"]})
    assert set(pair.stages(0).deployment.tensors) == {"param/a"}


def test_a_source_that_does_not_have_it(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a"), None)
    pair.deploy(second, 1, state("param/b"), None)
    with pytest.raises(PipelineError) as caught:
        pair.deploy(second, 2, {}, {first.address: ["param/x"]})
    message = str(caught.value)
    assert f"worker {second.address} could not take over layers of stage 2 from worker {first.address}" in message
    assert "does not hold param/x" in message
    with pytest.raises(PipelineError, match="from itself, but the stage does not hold param/y"):
        pair.deploy(second, 2, {}, {"": ["param/y"]})
    assert pair.deploy(second, 2, {}, {"": ["param/b"]}) == 0, "it may be tried again"


def test_a_source_of_another_term(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a"), None)
    pair.deploy(first, 2, state("param/a"), None)
    with pytest.raises(PipelineError, match="no stage of term 1 to hand layers over from"):
        pair.deploy(second, 2, {}, {first.address: ["param/a"]})
    with pytest.raises(WrongTerm, match="no longer has its stage of term 1, whose layers stage 2 goes on with"):
        pair.deploy(second, 2, {}, {"": ["param/a"]})


def test_a_stage_that_does_not_come_to_it_in_time(pair: Pair, deployment: Any) -> None:
    pair.first.deploy(deployment(stages=3, spec={"slow": True}))
    with pytest.raises(TransportError, match="the stage is slow"):
        pair.first.handover(1, ["weight"], 0.0)


def test_an_unreachable_source_is_named_and_another_way_is_open(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a"), None)
    pair.deploy(second, 1, state("param/b"), None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    if isinstance(first, HttpWorker):
        wrong = address
    else:
        wrong = first.address
        first._cluster.apart.add((second.address, first.address))
    with pytest.raises(SourceUnreachable) as caught:
        pair.deploy(second, 2, {}, {"": ["param/b"], wrong: ["param/a"]})
    assert caught.value.address == wrong
    message = str(caught.value)
    assert f"worker {second.address} could not take over layers of stage 2 from worker {wrong}" in message
    assert "Workers must reach each other" in message
    relayed = first.handover(1, ["param/a"], 30.0).tensors
    assert pair.deploy(second, 2, relayed, {"": ["param/b"]}) == 0
    assert set(pair.stages(1).deployment.tensors) == {"param/a", "param/b"}


def test_a_refused_token_names_both_workers(start_worker: Any, deployment: Any) -> None:
    servers = [start_worker(link_timeout=0.3) for _ in range(2)]
    first, second = (HttpWorker(server.url, "secret", timeout=30.0) for server in servers)
    first.claim("run-1", "me", "another-link")
    second.claim("run-1", "me", "link")
    first.deploy(deployment(stages=3, link_token="another-link"))
    sources = Sources(1, {first.address: ["weight"]})
    with pytest.raises(PipelineError) as caught:
        second.deploy(deployment(stage=2, stages=3, term=2, tensors={}, sources=sources))
    assert not isinstance(caught.value, SourceUnreachable)
    message = str(caught.value)
    assert f"worker {second.address} could not take over layers of stage 2 from worker {first.address}" in message
    assert "token" in message
    for worker in (first, second):
        worker.close()
        worker.release()


def test_a_faulted_source_reports_its_own_fault(pair: Pair) -> None:
    first, second = pair.first, pair.second
    pair.deploy(first, 1, state("param/a"), None)
    fault = Fault(1, ("a",), first.address, "forward of batch 7", "ValueError: no", "the traceback")

    def hand_over(names: Any, timeout: float) -> StageState:
        raise StageFault(fault)

    pair.stages(0).handover = hand_over
    with pytest.raises(StageFault, match=r"stage 1 \(a\) on .* failed in the forward of batch 7"):
        pair.deploy(second, 2, {}, {first.address: ["param/a"]})


def test_a_release_ends_a_handover_that_stalls(start_worker: Any, deployment: Any) -> None:
    server = start_worker()
    worker = HttpWorker(server.url, "secret", timeout=30.0)
    worker.claim("run-1", "me", "link")
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        sources = Sources(1, {f"http://127.0.0.1:{stalled.getsockname()[1]}": ["param/a"]})
        errors: list[Exception] = []

        def deploy() -> None:
            try:
                worker.deploy(deployment(term=2, stages=3, tensors={}, sources=sources))
            except PipelineError as error:
                errors.append(error)

        thread = threading.Thread(target=deploy)
        thread.start()
        connection, _ = stalled.accept()
        with connection:
            worker.release()
            thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1
    worker.close()


class Shelf:
    """A source that hands out what it is told to."""

    def __init__(self, answer: StageState | Exception) -> None:
        self.answer = answer
        self.asked: list[Any] = []
        self.closed = 0

    def handover(self, run: str, term: int, names: Any) -> StageState:
        self.asked.append((run, term, list(names)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed += 1


def test_a_deployment_is_completed_with_scalars_and_nothing_that_was_not_asked_for(deployment: Any) -> None:
    shelf = Shelf(
        StageState(
            {"optimizers": [{"a": {"step": 3}, "z": {"step": 9}}]},
            state("param/a", "optim/0/m/a", "grad/a", "param/z", "optim/0/m/z", "grad/z"),
        )
    )
    own = StageState({"optimizers": [{"b": {"step": 4}}, {"b": {"x": 1}}]}, state("param/b", "const/c"))
    sources = Sources(6, {"http://a:1": ["param/a"], "": ["const/c", "param/b"]})
    sent = deployment(term=7, tensors=state("param/d"), spec={"optimizer_state": [{"d": {"step": 5}}]}, sources=sources)
    done, carried = take_over(sent, Kept(6, own), lambda address: shelf, "http://me:1")
    assert shelf.asked == [("run-1", 6, ["param/a"])]
    assert shelf.closed == 1
    assert carried == 16 * 6
    assert set(done.tensors) == {"param/a", "optim/0/m/a", "grad/a", "param/b", "const/c", "param/d"}
    assert done.spec["optimizer_state"] == [{"a": {"step": 3}, "b": {"step": 4}, "d": {"step": 5}}, {"b": {"x": 1}}]
    assert done.tensors["param/b"] is own.tensors["param/b"], "nothing of the own stage is copied"


@pytest.mark.parametrize(
    "spec",
    [{}, {"optimizers": 3}, {"optimizers": [1]}, {"optimizers": [{"a": 1}]}],
    ids=["none", "int", "list", "value"],
)
def test_a_state_that_is_none_is_refused(deployment: Any, spec: dict[str, Any]) -> None:
    sources = Sources(1, {"http://a:1": ["param/a"]})
    sent = deployment(term=2, spec={"optimizer_state": []}, sources=sources)
    with pytest.raises(PipelineError, match="took over layers of stage 1 from http://a:1, but a state must hold"):
        take_over(sent, None, lambda address: Shelf(StageState(spec, state("param/a"))), "http://me:1")
