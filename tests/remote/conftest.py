"""Workers in a thread, with stages that send back what they are sent."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accept.codecs import Payload
from lightning_accept.graph import Chain, trace
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.pipeline.events import Event, events_to_json
from lightning_accept.pipeline.handover import part_of
from lightning_accept.pipeline.messages import Deployment, Fault, Packet, StageFault, StageState, WrongTerm
from lightning_accept.pipeline.transport import Channel
from lightning_accept.remote.server import ServerOptions, serve

TOKEN = "secret"


class EchoStage:
    """Passes every packet on, from a thread of its own; keeps what it took."""

    def __init__(
        self, deployment: Deployment, *, device: torch.device, upstream: Channel, downstream: Channel, where: str
    ) -> None:
        if "refuse" in deployment.spec:
            raise ValueError(deployment.spec["refuse"])
        if "break" in deployment.spec:
            raise KeyError(deployment.spec["break"])
        self.deployment = deployment
        self.where = where
        self.taken: list[Packet] = []
        self.refusals: list[Exception] = []
        self.before_taking: Callable[[], Any] = lambda: None
        self.closed = threading.Event()
        self.fault: Fault | None = None
        self._channels = {"up": upstream, "down": downstream}
        self._queues: dict[str, queue.SimpleQueue[Packet | None]] = {
            name: queue.SimpleQueue() for name in self._channels
        }
        self._threads = [threading.Thread(target=self._pass_on, args=(name,)) for name in self._channels]
        self._seen: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def deliver(self, packet: Packet) -> None:
        self.before_taking()
        if self.fault is not None:
            raise StageFault(self.fault)
        if self.refusals:
            raise self.refusals.pop(0)
        if packet.term != self.deployment.term:
            raise WrongTerm(f"term {packet.term}, here it is {self.deployment.term}")
        with self._lock:
            if (packet.kind, packet.job) not in self._seen:
                self._seen.add((packet.kind, packet.job))
                self.taken.append(packet)
                self._queues[packet.direction].put(packet)

    def _pass_on(self, direction: str) -> None:
        while (packet := self._queues[direction].get()) is not None:
            try:
                self._channels[direction].send(packet)
            except Exception as error:
                line = f"{type(error).__name__}: {error}"
                self.fault = Fault(self.deployment.stage, ("echo",), self.where, "sending", line, "trace")
                return

    def state(self, timeout: float) -> StageState:
        if self.deployment.spec.get("slow"):
            raise TimeoutError("the stage is slow")
        return StageState({"taken": len(self.taken)}, self.deployment.tensors)

    def handover(self, names: Sequence[str] | None, timeout: float) -> StageState:
        if self.deployment.spec.get("slow"):
            raise TimeoutError("the stage is slow")
        state = StageState({"optimizers": []}, self.deployment.tensors)
        return state if names is None else part_of(state, names)

    def stats(self) -> dict[str, Any]:
        return {"jobs": len(self.taken)}

    def events(self, term: int, after: int) -> dict[str, Any]:
        own = self.deployment.term
        numbers = range(after if term == own else 0, len(self.taken))
        events = [Event("forward", float(number), number + 0.5, number, stage=1, term=own) for number in numbers]
        return events_to_json(events, len(self.taken), 100.0, 1, own)

    def close(self) -> None:
        self.closed.set()
        for name, channel in self._channels.items():
            channel.close()
            self._queues[name].put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()


class RunningWorker:
    """A worker daemon in a thread of this process."""

    def __init__(self, **options: Any) -> None:
        self.stages: list[EchoStage] = []
        self.url = ""
        self._listening = threading.Event()
        self._options = ServerOptions(token=TOKEN, **options)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._listening.wait(30)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()

        def listening(port: int) -> None:
            scheme = "http" if self._options.tls is None else "https"
            self.url = f"{scheme}://127.0.0.1:{port}"
            self._listening.set()

        def make_stage(*arguments: Any, **options: Any) -> EchoStage:
            stage = EchoStage(*arguments, **options)
            self.stages.append(stage)
            return stage

        await serve(self._options, make_stage, on_listening=listening, stop=self._stop)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., RunningWorker]]:
    workers: list[RunningWorker] = []

    def start(**options: Any) -> RunningWorker:
        workers.append(RunningWorker(**options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def profile_request() -> ProfileRequest:
    """Every layer of three and all of them together."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    traced = trace(net, (torch.randn(8, 4),), {})
    chain = Chain.from_trace(traced)
    count = len(chain.layers)
    spans = [(0, count), *((layer, layer + 1) for layer in range(count))]
    return ProfileRequest.of(chain, traced, spans, seconds=0.01)


@pytest.fixture
def echo_stage() -> type[EchoStage]:
    return EchoStage


@pytest.fixture
def packet() -> Callable[..., Packet]:
    def make(job: int = 0, kind: str = "forward", term: int = 1, run: str = "run-1", size: int = 4) -> Packet:
        payload = Payload({"data": torch.full((size,), float(job))}, {"codec": "raw"})
        return Packet(kind, run, term, job, {"batch": job}, (payload, None))  # type: ignore[arg-type]

    return make


@pytest.fixture
def deployment() -> Callable[..., Deployment]:
    def make(**changes: Any) -> Deployment:
        fields: dict[str, Any] = {
            "run": "run-1",
            "term": 1,
            "stage": 1,
            "stages": 2,
            "spec": {},
            "tensors": {"weight": torch.arange(6.0).reshape(2, 3)},
            "upstream": None,
            "downstream": None,
            "link_token": "link",
        }
        return Deployment(**{**fields, **changes})

    return make
