"""Moving layers between stages is exact, and only what changes hands travels."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, trace
from lightning_accept.partition.schedule import Schedule, default_schedule
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.gather import restore_state
from lightning_accept.pipeline.handover import nbytes
from lightning_accept.pipeline.messages import PipelineError, StageState, TransportError
from lightning_accept.pipeline.moves import MoveReport
from lightning_accept.pipeline.optimizers import hyper_parameters
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.local import LocalWorkers
from lightning_accept.remote.memory import MemoryCluster, MemoryWorker

WIDTH = 6
Place = tuple[Sequence[int], Sequence[int]]
"""First layers of the workers' stages, and the numbers of the workers, from 0."""


class Tied(nn.Module):
    """Two layers that share a weight, which therefore stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


class Shift(nn.Module):
    """No parameters, but a constant that two layers share."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        *(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), Tied(), nn.Dropout(0.3), linear(), Shift()),
        *(nn.BatchNorm1d(WIDTH), linear(), nn.Tanh(), Shift(), linear(), linear(), linear(), linear()),
    )
    net[5].bias.requires_grad_(False)
    return net


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
}


class Bench:
    """A net of eight layers on the central node and three workers, and a training loop as Lightning's."""

    def __init__(
        self, in_flight: int = 1, optimizer: str = "momentum", workers: list[Any] | None = None, timeout: float = 30.0
    ) -> None:
        self.net = make_net()
        self.cluster = MemoryCluster(3, build_stage)
        outside = self.net[11].bias  # a parameter in no optimizer
        biases = [p for n, p in self.net.named_parameters() if n.endswith("bias") and p is not outside]
        rest = [p for n, p in self.net.named_parameters() if not n.endswith("bias")]
        groups = [{"params": rest}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.in_flight = in_flight
        self.trace = trace(self.net, (torch.randn(4, WIDTH),), {})
        self.chain = Chain.from_trace(self.trace)
        self.pipeline = CentralPipeline(
            self.cluster.workers if workers is None else workers,
            Settings(Raw(), Raw(), Raw(), weight_prediction=True, seed=5),
            device=torch.device("cpu"),
            timeout=timeout,
            batch_timeout=timeout,
        )
        self.begun = 0
        torch.manual_seed(11)

    def arguments(self, place: Place) -> tuple[Any, ...]:
        starts, numbers = place
        workers = [self.pipeline.claimed[number] for number in numbers]
        return self.trace, self.chain, starts, self.schedule(len(starts)), [self.optimizer], workers

    def schedule(self, workers: int) -> Schedule:
        return default_schedule(workers, self.in_flight)

    def deploy(self, place: Place) -> None:
        self.pipeline.deploy(*self.arguments(place))

    def move(self, place: Place) -> MoveReport:
        return self.pipeline.move(*self.arguments(place))

    def redeploy(self, place: Place) -> None:
        self.gather()
        self.deploy(place)

    def gather(self) -> None:
        def restore(stage: int, state: StageState) -> None:
            restore_state(state, self.trace.parameters, self.trace.buffers, [self.optimizer])

        self.pipeline.gather(restore)

    def train(self, batches: int, accumulate: int = 1) -> None:
        """Train some batches and drain; every ``accumulate``-th of the run ends with an update."""
        if self.in_flight > 1:
            self._train_in_flight(batches, accumulate)
            return
        for _ in range(batches):
            ticket = self.pipeline.begin([self._batch()])
            (output,) = self.pipeline.output(ticket)
            output.requires_grad_()
            output.square().mean().backward()
            if self.begun % accumulate == 0:
                self.zero_grad()
            self.pipeline.backward(ticket, [output.grad], None)
            self.pipeline.complete(ticket)
            for name, gradient in self.pipeline.take_gradients().items():
                parameter = self.trace.parameters[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self.begun += 1
            if self.begun % accumulate == 0:
                self.optimizer.step()
                self.pipeline.step([[0, hyper_parameters(self.optimizer)]])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.pipeline.zero_gradients(0)

    def _train_in_flight(self, batches: int, accumulate: int) -> None:
        ends = [(self.begun + number + 1) % accumulate == 0 for number in range(batches)]
        tickets = [self.pipeline.begin([self._batch()], updates=end) for end in ends]
        self.begun += batches
        self.pipeline.flush()
        for ticket, end in zip(tickets, ends, strict=True):
            (output,) = self.pipeline.output(ticket)
            self.pipeline.backward(
                ticket, [2 * output / output.numel()], [[0, hyper_parameters(self.optimizer)]] if end else None
            )
            self.pipeline.complete_lagging(1)
        self.pipeline.settle()

    def _batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(100 + self.begun)
        return torch.randn(4, WIDTH, generator=generator)

    def result(self) -> dict[str, Any]:
        self.gather()
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    before = set(threading.enumerate())
    made: list[Bench] = []

    def make(*arguments: Any, **options: Any) -> Bench:
        made.append(Bench(*arguments, **options))
        made[-1].pipeline.connect("me")
        return made[-1]

    yield make
    for item in made:
        item.pipeline.close()
    assert not [thread.name for thread in set(threading.enumerate()) - before]


def same(ours: Bench, theirs: Bench) -> None:
    torch.testing.assert_close(ours.result(), theirs.result(), rtol=0.0, atol=0.0)


ALL = (0, 1, 2)
TOUR: list[Place] = [
    ([2, 4, 6], ALL),
    ([3, 4, 6], ALL),  # worker 1 to the central node
    ([1, 2, 3], ALL),  # from the central node, and up the chain by several layers: layers skip over a stage
    ([5, 6, 7], ALL),  # down the chain
    ([1, 6, 7], ALL),
    ([1, 2, 7], ALL),
    ([2, 5], (0, 2)),  # without the middle one
    ([4], (1,)),  # only the middle one, which knows nothing
    ([1, 6], (1, 2)),
    ([2, 4, 6], ALL),
    ([2, 4, 6], ALL),  # nothing moves
]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_synchronous_run_that_moves_all_the_time_equals_one_that_never_does(
    bench: Any, optimizer: str, accumulate: int
) -> None:
    moving, staying = bench(1, optimizer), bench(1, optimizer)
    assert len(moving.chain.layers) == 8
    results = []
    for b in (moving, staying):
        torch.manual_seed(11)
        b.deploy(TOUR[0])
        for place in TOUR[1:]:
            b.train(2, accumulate)
            if b is moving:
                b.move(place)
        b.train(2, accumulate)
        results.append(torch.get_rng_state())
    assert torch.equal(*results)
    same(moving, staying)
    assert moving.optimizer.state_dict()["state"]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(("in_flight", "accumulate"), [(2, 1), (4, 1), (4, 2), (4, 3)])
def test_with_batches_in_flight_a_move_equals_a_redeployment(
    bench: Any, optimizer: str, in_flight: int, accumulate: int
) -> None:
    moving, redeploying = bench(in_flight, optimizer), bench(in_flight, optimizer)
    for b in (moving, redeploying):
        b.deploy(TOUR[0])
        for place in TOUR[1:]:
            b.train(in_flight, accumulate)
            (b.move if b is moving else b.redeploy)(place)
        b.train(in_flight, accumulate)
    same(moving, redeploying)
    assert moving.optimizer.state_dict()["state"]


def partitions(layers: int, workers: int) -> Iterator[list[int]]:
    for starts in itertools.combinations(range(1, layers), workers):
        yield list(starts)


def test_from_one_partition_to_the_next_through_all_of_them(bench: Any) -> None:
    moving, staying = bench(1, "adam"), bench(1, "adam")
    for b in (moving, staying):
        torch.manual_seed(11)
        b.deploy(TOUR[0])
        b.train(3, 2)
    before = moving.pipeline.term
    for starts in partitions(8, 3):
        moving.move((starts, ALL))
    assert moving.pipeline.term == before + 35
    for b in (moving, staying):
        torch.manual_seed(12)
        b.train(3, 2)
    same(moving, staying)


def test_a_redeployment_within_accumulation_keeps_the_gradients_of_stage_0_too(bench: Any) -> None:
    moving, staying = bench(1), bench(1)
    for b in (moving, staying):
        torch.manual_seed(11)
        b.deploy(TOUR[0])
        for place in TOUR[1:]:
            b.train(1, 3)
            if b is moving:
                b.redeploy(place)
        b.train(1, 3)
    same(moving, staying)


def test_gradients_dropped_before_a_move_do_not_come_back(bench: Any) -> None:
    """zero_grad() reaches workers with the next backward only; until then they hold what was dropped."""
    moving, staying = bench(1), bench(1)
    for b in (moving, staying):
        torch.manual_seed(11)
        b.deploy(([2, 4, 6], ALL))
        b.train(1, 9)
        b.zero_grad()
        if b is moving:
            b.move(([5, 6, 7], ALL))
            assert b.net[8].weight.grad is None
            b.move(([1, 2, 7], ALL))
        b.train(1, 9)
        b.optimizer.step()
        b.pipeline.step([[0, hyper_parameters(b.optimizer)]])
    same(moving, staying)


def test_gradients_lie_where_plain_training_has_them(bench: Any) -> None:
    b = bench(1)
    b.deploy(([2, 4, 6], ALL))
    b.train(1, 2)
    first = b.net[0].weight.grad.clone()
    b.move(([3, 4, 6], ALL))
    assert torch.equal(b.net[0].weight.grad, first)
    assert b.net[5].weight.grad is not None, "came with its layer"
    assert b.net[5].bias.grad is None, "is frozen"
    b.move(([1, 4, 6], ALL))
    assert torch.equal(b.net[0].weight.grad, first)
    assert b.net[5].weight.grad is None, "left with its layer"
    b.train(1, 2)
    b.move(([2, 4, 6], ALL))
    assert b.net[3].a.weight.grad is None, "an optimizer step has used it"


class Counting(MemoryWorker):
    """Counts the bytes of state that come to this worker and go from it."""

    deployed = handed = 0

    def deploy(self, deployment: Any, timeout: float | None = None) -> int:
        self.deployed += nbytes(deployment)
        return super().deploy(deployment, timeout)

    def handover(self, term: int, names: Sequence[str], timeout: float) -> StageState:
        state = super().handover(term, names, timeout)
        self.handed += nbytes(state)
        return state


@pytest.fixture
def counting() -> list[Counting]:
    cluster = MemoryCluster(3, build_stage)
    workers = [Counting(cluster, worker.address) for worker in cluster.workers]
    cluster.workers[:] = workers
    return workers


def layer_bytes(b: Bench, *layers: int) -> int:
    """Bytes of weights, momentum and buffers of these layers."""
    total = 0
    for layer in layers:
        program = b.chain.program(layer, layer + 1)
        parameters = [b.trace.parameters[name] for name in program.parameters]
        total += sum(p.nbytes * (1 + (p in b.optimizer.state)) for p in parameters)
        total += sum(b.trace.buffers[name].nbytes for name in program.buffers)
        total += sum(tensor.nbytes for tensor in program.constants.values())
    return total


def counted(workers: list[Counting]) -> tuple[list[int], list[int]]:
    figures = [w.deployed for w in workers], [w.handed for w in workers]
    for worker in workers:
        worker.deployed = worker.handed = 0
    return figures


def test_only_layers_that_change_hands_travel(bench: Any, counting: list[Counting]) -> None:
    b = bench(1, workers=counting)
    b.deploy(([2, 4, 6], ALL))
    b.train(1)
    b.gather()  # the optimizer's state is known here from now on, as layer_bytes needs it
    counted(counting)
    between = layer_bytes(b, 5)
    report = b.move(([2, 4, 5], ALL))
    assert counted(counting) == ([0, 0, 0], [0, between, 0])
    assert (report.nbytes, report.layers) == (between, 1)
    assert report.seconds > 0
    out, back = layer_bytes(b, 1), layer_bytes(b, 4)
    report = b.move(([1, 5, 6], ALL))
    assert counted(counting) == ([out, 0, 0], [0, back, between])
    assert (report.nbytes, report.layers) == (out + back + between, 3)
    report = b.move(([1, 5, 6], ALL))
    assert counted(counting) == ([0, 0, 0], [0, 0, 0])
    assert (report.nbytes, report.layers) == (0, 0)
    home = layer_bytes(b, 1) - sum(t.nbytes for t in b.chain.program(1, 2).constants.values())
    assert b.move(([2, 5, 6], ALL)).nbytes == home
    assert counted(counting) == ([0, 0, 0], [home, 0, 0])


def test_a_worker_that_is_left_out_is_idle_but_claimed(bench: Any) -> None:
    b = bench(1)
    b.deploy(TOUR[0])
    b.train(1)
    b.move(([2, 5], (0, 2)))
    workers = b.cluster.workers
    assert b.pipeline.workers == [workers[0], workers[2]]
    assert b.pipeline.claimed == workers
    assert workers[1].stats() == {}
    assert [stage["stage"] for stage in b.pipeline.stats()] == [0, 1, 2]
    with pytest.raises(PipelineError, match="busy: held by me"):
        workers[1].claim("another", "you", "token")
    b.train(1)
    b.redeploy(([3], (1,)))
    assert [worker.stats() == {} for worker in workers] == [True, False, True]
    b.train(1)
    b.redeploy(TOUR[0])
    b.train(1)


def test_previous_stages_are_forgotten_once_all_stand(bench: Any) -> None:
    b = bench(1)
    b.deploy(TOUR[0])
    b.move(TOUR[1])
    for worker in b.cluster.workers:
        with pytest.raises(PipelineError, match="no stage of term 1 to hand layers over from"):
            worker.handover(1, [], 1.0)


def test_evaluation_goes_on_after_a_move(bench: Any) -> None:
    b = bench(4)
    b.deploy(TOUR[0])
    for place in TOUR[1:]:
        b.move(place)
        number = b.pipeline.evaluate([torch.ones(3, WIDTH)], training=False)
        (output,) = b.pipeline.evaluated(number)
        torch.testing.assert_close(output, b.net.eval()(torch.ones(3, WIDTH)))


def test_the_central_node_relays_between_workers_that_cannot_reach_each_other(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    moving, staying = bench(1), bench(1)
    moving.cluster.apart = {("memory://3", "memory://2"), ("memory://2", "memory://3"), ("memory://3", "memory://1")}
    for b in (moving, staying):
        torch.manual_seed(11)
        b.deploy(([2, 4, 6], ALL))
        b.train(1, 2)
        if b is moving:
            assert b.move(([2, 3, 5], ALL)).nbytes > 0
            message = "memory://3 could not take over layers of stage 3 from worker memory://2"
            assert message in caplog.text
            assert "go by way of the central node" in caplog.text
            b.move(([2, 3, 6], ALL))
            b.move(([1, 2, 3], ALL))
        b.train(1, 2)
    same(moving, staying)


def test_a_move_that_fails_ends_the_pipeline_and_says_why(bench: Any) -> None:
    b = bench(1, timeout=5.0)
    b.deploy(([2, 4, 6], ALL))
    b.train(1)
    b.cluster.workers[1].unreachable = True
    with pytest.raises(TransportError, match="memory://2 could not be reached"):
        b.move(([2, 4, 5], ALL))
    assert b.pipeline.failed
    with pytest.raises(PipelineError):
        b.train(1)


def test_an_owner_that_nobody_reaches_is_named_with_the_worker_that_needs_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: Any) -> StageState:
        raise TransportError("worker memory://2 is lost")

    b = bench(1)
    b.deploy(([2, 4, 6], ALL))
    monkeypatch.setattr(b.cluster.workers[1], "handover", lost)
    message = "memory://3 could not take over .* from worker memory://2.* By way of the central node it failed too: "
    with pytest.raises(TransportError, match=message):
        b.move(([2, 4], (0, 2)))
    assert b.pipeline.failed


def test_the_state_of_a_faulted_stage_is_not_moved(bench: Any) -> None:
    b = bench(1)
    b.deploy(([2, 4, 6], ALL))
    with pytest.raises(PipelineError, match="holds NaN"):
        ticket = b.pipeline.begin([torch.ones(4, WIDTH)])
        (output,) = b.pipeline.output(ticket)
        b.pipeline.backward(ticket, [torch.full_like(output, torch.nan)], None)
        b.pipeline.complete(ticket)
    with pytest.raises(PipelineError):
        b.move(([3, 4, 6], ALL))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (([2, 4], (1, 0)), r"cannot be put on memory://2, memory://1: give some of the claimed workers \(memory://1,"),
        (([2, 4], (1, 1)), "in this order"),
        (([], ()), "cannot be put on no workers"),
        (([2, 4, 6], (0, 1)), "3 stages with 3 windows do not fit the 2 workers memory://1, memory://2"),
    ],
)
@pytest.mark.parametrize("kind", ["deploy", "move"])
def test_workers_that_do_not_fit_are_refused_and_nothing_happens(
    bench: Any, kind: str, place: Place, message: str
) -> None:
    b = bench(1)
    b.deploy(([2, 4, 6], ALL))
    with pytest.raises(PipelineError, match=message):
        getattr(b, kind)(place)
    assert b.pipeline.term == 1
    b.train(1)


def test_a_move_wants_a_drained_pipeline_and_the_trace_that_is_deployed(bench: Any) -> None:
    b = bench(4)
    with pytest.raises(PipelineError, match="no stages are deployed"):
        b.move(TOUR[0])
    b.deploy(TOUR[0])
    b.pipeline.begin([torch.ones(4, WIDTH)])
    with pytest.raises(PipelineError, match="drain the pipeline before a move"):
        b.move(TOUR[1])
    b.pipeline.abandon()
    b.trace = trace(b.net, (torch.randn(4, WIDTH),), {})
    with pytest.raises(PipelineError, match="layers of another trace cannot be moved"):
        b.move(TOUR[1])
    assert not b.pipeline.failed


def test_over_http_between_processes_a_move_is_exact_too(bench: Any) -> None:
    with LocalWorkers(3, threads=1) as local:
        workers = [HttpWorker(url, local.token) for url in local.urls]
        moving, staying = bench(1, "adam", workers=workers), bench(1, "adam")
        for b in (moving, staying):
            torch.manual_seed(11)
            b.deploy(TOUR[0])
            for place in TOUR[1:]:
                b.train(1, 2)
                if b is moving:
                    b.move(place)
            b.train(1, 2)
        same(moving, staying)
        moving.pipeline.close()


def test_deploying_moving_and_gathering_show_how_far_they_are(bench: Any, noted: Any) -> None:
    b = bench(1)
    b.pipeline._progress = noted
    b.deploy(([2, 4, 6], ALL))
    ((first, *rest),) = noted.take()
    assert first == ("deploying 3 stages", 0.0)
    assert [title for title, _ in rest] == [f"deploying: {n} of 3 stages in place" for n in (1, 2, 3)]
    shares = [share for _, share in rest]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    b.move(([3, 4, 6], ALL))
    ((*on_the_way, last),) = noted.take()
    assert on_the_way[:5] == [("moving 1 layers", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert last[0] == "moving 1 layers"
    b.gather()
    (states,) = noted.take()
    titles = [f"gathering stage {n} of 3 from memory://{n}" for n in (1, 2, 3)]
    shares = [0.0, 0.333, 0.667, 1.0]
    expected = [(title, share) for n, title in enumerate(titles) for share in shares[n : n + 2]]
    assert states == [("gathering", 0.0), *expected]
