"""Codecs in the pipeline: bytes on the socket, determinism, straight-through gradients, and refusals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonargparse
import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy, BitWidthScheduler, MultiBit, StochasticUniform
from lightning_accept.codecs import Codec, Raw, decode
from lightning_accept.pipeline.messages import Packet, PipelineError
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.disturb import Disturbance, RandomDisturbance
from lightning_accept.remote.local import LocalWorkers
from lightning_accept.remote.memory import MemoryCluster

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

BATCH, WIDTH, CLASSES = 16, 32, 40
PARTITION = ["2", "4"]


def make_net() -> nn.Sequential:
    """Three stages of two layers; half a batch of every tensor on a link has 256 elements, and so is quantised."""
    return nn.Sequential(
        *(nn.Linear(6, WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
    )


class Model(L.LightningModule):
    def __init__(self, net: nn.Module | None = None, interval: int = 1000) -> None:
        super().__init__()
        self.net = make_net() if net is None else net
        self.interval = interval
        self.validated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.net(batch[0]))

    def on_validation_start(self) -> None:
        self.validated.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.interval, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_data(batches: int, *, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    count = batches * BATCH
    return TensorDataset(
        torch.randn(count, 6, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    )


def fit(
    model: Model,
    strategy: AccEPTStrategy,
    data: TensorDataset,
    *,
    validation: TensorDataset | None = None,
    batch_size: int = BATCH,
    **arguments: Any,
) -> Model:
    trainer = L.Trainer(
        **{"max_epochs": 1, **arguments},
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if validation is None else None,
    )
    trainer.fit(model, DataLoader(data, batch_size), None if validation is None else DataLoader(validation, batch_size))
    return model


def memory(disturb: Callable[[Packet], Disturbance] | None = None, **arguments: Any) -> AccEPTStrategy:
    return AccEPTStrategy(MemoryCluster(2, build_stage, disturb).workers, partition=PARTITION, **arguments)


class Witness:
    """Sees every packet between the stages, and passes it on as ``then`` does."""

    def __init__(self, then: Callable[[Packet], Disturbance] | None = None) -> None:
        self.packets: list[Packet] = []
        self.then = then
        self._lock = threading.Lock()

    def __call__(self, packet: Packet) -> Disturbance:
        with self._lock:
            self.packets.append(packet)
        return Disturbance() if self.then is None else self.then(packet)

    def bits(self, kind: str) -> dict[int, list[int]]:
        """By batch, the bit widths that its tensors were encoded with on all links."""
        found: dict[int, list[int]] = {}
        for packet in self.packets:
            for payload in packet.payloads:
                if packet.kind == kind and payload is not None:
                    found.setdefault(packet.meta["batch"], []).append(payload.meta["bits"])
        return found


# ----- straight-through gradients, and a codec per link and direction


class Link(nn.Module):
    """What one link does to values on their way down and to gradients on their way up, in one process."""

    def __init__(self, forward_codec: Codec, backward_codec: Codec) -> None:
        super().__init__()
        self.codecs = forward_codec.fresh(), backward_codec.fresh()

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.codecs

        class Through(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return decode(down.encode(value))

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return decode(up.encode(gradient))

        result: Tensor = Through.apply(x)
        return result


CODECS: dict[str, tuple[Codec, Codec]] = {
    "paper": (MultiBit(2, reinit_every_epoch=True), StochasticUniform(8)),
    "free levels, blocks": (MultiBit(3, "free"), StochasticUniform(4, block=128)),
}


def wide_net() -> nn.Sequential:
    """As make_net, but the output is small against what crosses the cuts before it."""
    return nn.Sequential(
        *(nn.Linear(6, 256), nn.Tanh()),
        *(nn.Linear(256, 256), nn.Tanh()),
        *(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 20)),
    )


@pytest.mark.parametrize(
    ("make", "compress_output", "compressed"),
    [
        (make_net, "auto", True),
        (make_net, False, False),
        (wide_net, "auto", False),
        (wide_net, True, True),
    ],
)
@pytest.mark.parametrize("name", CODECS)
def test_gradients_pass_straight_through_quantised_activations(
    name: str, make: Callable[[], nn.Sequential], compress_output: Any, compressed: bool
) -> None:
    """Equal to quantising by hand between the stages of an ordinary module, each link with codecs of its own.

    The output and its gradient go through codecs where that is asked for, or else if they are not small.
    """
    down, up = CODECS[name]
    net, data = make(), make_data(6)
    data = TensorDataset(data.tensors[0], data.tensors[1] % net[-1].out_features)
    reference = make()
    reference.load_state_dict(net.state_dict())
    links = [Link(down, up), Link(down, up), Link(down, up) if compressed else Link(Raw(), Raw())]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for x, target in DataLoader(data, BATCH):
            for number, stage in enumerate((reference[:2], reference[2:4], reference[4:])):
                x = links[number](stage(x))
            optimizer.zero_grad()
            nn.functional.cross_entropy(x, target).backward()
            optimizer.step()
        for link in links:
            link.codecs[0].start_epoch()
    strategy = memory(in_flight=1, forward_codec=down, backward_codec=up, compress_output=compress_output)
    trained = fit(Model(net), strategy, data, max_epochs=2)
    torch.testing.assert_close(trained.net.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)


def test_the_reference_differs_from_training_without_codecs() -> None:
    """Guards the test above: quantisation is not lost in the tolerance."""
    start = make_net().state_dict()
    results = []
    for codecs in ({}, {"forward_codec": MultiBit(2)}, {"backward_codec": StochasticUniform(4)}):
        net = make_net()
        net.load_state_dict(start)
        results.append(fit(Model(net), memory(in_flight=1, **codecs), make_data(6)).net[0].weight.detach())
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert float((results[first] - results[second]).abs().max()) > 1e-4


# ----- bits that change in the middle of a run


def changing(disturb: Any, **arguments: Any) -> tuple[Model, Witness]:
    L.seed_everything(11, verbose=False)
    witness = Witness(disturb)
    strategy = memory(witness, forward_codec=MultiBit(), backward_codec=StochasticUniform(), **arguments)
    return fit(Model(interval=4), strategy, make_data(9), max_epochs=2, callbacks=[BitWidthScheduler()]), witness


ARGUMENTS: list[dict[str, int]] = [{"in_flight": 4}, {"in_flight": 3, "micro_batches": 2}]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["4", "3x2"])
def test_a_run_whose_bits_change_is_the_same_whatever_the_network_does(arguments: dict[str, int]) -> None:
    results = []
    for seed in (None, 1, 2):
        disturb = None if seed is None else RandomDisturbance(seed, loss=0.1, duplicate=0.1)
        model, witness = changing(disturb, **arguments)
        for kind, widths in (("forward", {2, 3, 4}), ("backward", {8, 4})):
            assert {bits for found in witness.bits(kind).values() for bits in found} == widths
        results.append(model.net.state_dict())
    for other in results[1:]:
        for name, weight in results[0].items():
            assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize("arguments", [{"in_flight": 1}, *ARGUMENTS], ids=["1", "4", "3x2"])
def test_bits_change_at_the_same_batch_on_every_link(arguments: dict[str, int]) -> None:
    _, witness = changing(None, **arguments)
    micro_batches = arguments.get("micro_batches", 1)
    for kind, widths in (("forward", [2, 3, 4]), ("backward", [8, 4])):
        by_batch = witness.bits(kind)
        assert sorted(by_batch) == list(range(18))
        for batch, found in by_batch.items():
            assert len(set(found)) == 1, f"batch {batch} travelled with {found}"
            assert len(found) == 3 * micro_batches
        in_order = [by_batch[batch][0] for batch in range(18)]
        assert list(dict.fromkeys(in_order)) == widths
    # The gradient of batch 4 is the first after the rate's first fall; activations in flight then had left before.
    assert [witness.bits("backward")[batch][0] for batch in (3, 4)] == [8, 4]


# ----- bytes on the socket


class CountingProxy:
    """A TCP proxy in front of a worker that counts what passes, in both directions."""

    def __init__(self, target: str) -> None:
        self.url = ""
        self.bytes = 0
        self._host, port = target.removeprefix("http://").split(":")
        self._port = int(port)
        self._listening = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._listening.wait(30)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))
            finally:
                there[1].close()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self.bytes += len(data)
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture
def proxies() -> Iterator[tuple[list[CountingProxy], str]]:
    """Two workers, each a process, behind a proxy each; and their token."""
    with LocalWorkers(2, threads=1, device="cpu") as workers:
        found = [CountingProxy(url) for url in workers.urls]
        yield found, workers.token
        for proxy in found:
            proxy.close()


class Meter(L.Callback):
    """Bytes on the sockets, and in the links' own figures, from batch 2 to the end of batch 6."""

    def __init__(self, proxies: Sequence[CountingProxy]) -> None:
        self.proxies = proxies
        self.batches = 0
        self.on_socket = 0
        self.in_figures = 0

    def figures(self, trainer: Any) -> int:
        return sum(link["payload_bytes"] for stage in trainer.strategy.stats() for link in stage["links"].values())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.in_figures = -self.figures(trainer)
            self.on_socket = -sum(proxy.bytes for proxy in self.proxies)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if 2 <= batch_idx <= 6:
            self.batches += 1
        if batch_idx == 6:
            self.on_socket += sum(proxy.bytes for proxy in self.proxies)
            self.in_figures += self.figures(trainer)


@pytest.mark.parametrize(
    ("down", "up"),
    [(MultiBit(2), StochasticUniform(8)), (MultiBit(2, "free"), StochasticUniform(4, block=128))],
    ids=["paper", "free levels, blocks"],
)
def test_bytes_on_the_socket_agree_with_the_codecs_figure(
    down: Codec, up: Codec, proxies: tuple[list[CountingProxy], str]
) -> None:
    """Framing, headers, polls and the optimizer's options included: within 2 % of what the codecs say they send."""
    counting, token = proxies
    batch = 61  # not divisible by eight: the padding is part of the figure
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES)),
    )
    images, labels = torch.randn(8 * batch, 3, 32, 32), torch.randint(0, CLASSES, (8 * batch,))
    strategy = AccEPTStrategy(
        [proxy.url for proxy in counting],
        partition=PARTITION,
        in_flight=1,
        forward_codec=down,
        backward_codec=up,
        token=token,
    )
    meter = Meter(counting)
    fit(Model(net), strategy, TensorDataset(images, labels), batch_size=batch, callbacks=[meter])
    shapes = [(batch, 16, 32, 32), (batch, 24, 32, 32)]
    output = 2 * 4 * batch * CLASSES  # it is small, and travels as it is
    promised = meter.batches * (sum(down.wire_bytes(shape, 4) + up.wire_bytes(shape, 4) for shape in shapes) + output)
    assert meter.batches == 5
    assert meter.in_figures == promised
    assert promised < meter.on_socket <= promised * 1.02


# ----- evaluation


@pytest.mark.parametrize("in_flight", [1, 4])
def test_validation_is_that_of_the_module_without_codecs(in_flight: int) -> None:
    strategy = memory(in_flight=in_flight, forward_codec=MultiBit(2), backward_codec=StochasticUniform(4))
    validation = make_data(3, seed=5)
    model = fit(Model(), strategy, make_data(7), validation=validation)
    model.net.eval()
    with torch.no_grad():
        expected = [model.net(x) for x, _ in DataLoader(validation, BATCH)]
    assert len(model.validated) == 3
    torch.testing.assert_close(model.validated, expected, rtol=1e-6, atol=1e-6)


def test_another_codec_for_evaluation_is_used_when_asked_for() -> None:
    witness = Witness()
    strategy = memory(witness, forward_codec="raw", backward_codec="raw", eval_codec="fp16")
    fit(Model(), strategy, make_data(2), validation=make_data(2))
    codecs = {(p.kind, payload.meta["codec"]) for p in witness.packets for payload in p.payloads if payload is not None}
    assert codecs == {("forward", "raw"), ("backward", "raw"), ("evaluate", "fp16")}


# ----- names, instances, YAML


def used(strategy: AccEPTStrategy) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (codec.name, codec.config()) for name, codec in strategy._codecs.items()}


def test_the_default_pair_is_the_one_that_the_convergence_benchmark_supports() -> None:
    default = used(AccEPTStrategy())
    chosen = AccEPTStrategy(forward_codec=MultiBit(4, "signed"), backward_codec=StochasticUniform(8))
    assert default == used(chosen)


def test_names_and_instances() -> None:
    by_name = used(AccEPTStrategy(forward_codec="multibit", backward_codec="stochastic"))
    by_instance = used(AccEPTStrategy(forward_codec=MultiBit(), backward_codec=StochasticUniform()))
    assert by_name == by_instance
    assert [name for name, _ in by_name.values()] == ["multibit", "stochastic", "raw"]
    with pytest.raises(ValueError, match=r"no codec 'multi'; choose one of .*multibit.*stochastic"):
        AccEPTStrategy(forward_codec="multi")


YAML = """
strategy:
  class_path: lightning_accept.AccEPTStrategy
  init_args:
    forward_codec:
      class_path: lightning_accept.MultiBit
      init_args: {bits: 3, levels: free}
    backward_codec: stochastic
callback:
  class_path: lightning_accept.BitWidthScheduler
  init_args: {forward: [3, 4], fraction: 0.7}
"""


def test_yaml() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    parser.add_subclass_arguments(L.Callback, "callback")
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    objects = instantiate(parser.parse_string(YAML))
    codecs = used(objects.strategy)
    assert codecs["forward_codec"] == ("multibit", MultiBit(3, "free").config())
    assert codecs["backward_codec"] == ("stochastic", StochasticUniform().config())
    assert (list(objects.callback.forward), objects.callback.fraction) == ([3, 4], 0.7)


# ----- refusals


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("forward", "stage 1: forward of batch 3 from the previous stage"), ("backward", "backward of batch 3")],
)
def test_a_damaged_payload_is_refused_with_link_and_batch(kind: str, name: str, in_flight: int) -> None:
    def damage(packet: Packet) -> Disturbance:
        if packet.kind == kind and packet.meta["batch"] == 3 and packet.payloads[0] is not None:
            packet.payloads[0].meta["bits"] = 77
        return Disturbance()

    strategy = memory(damage, in_flight=in_flight, forward_codec="multibit", backward_codec="stochastic")
    with pytest.raises(PipelineError, match=rf"{name}.*cannot be decoded: bits must be .* not 77"):
        fit(Model(), strategy, make_data(6))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_nan_in_a_batch_is_refused_by_stage_and_batch(value: float, in_flight: int) -> None:
    data = make_data(6)
    data.tensors[0][3 * BATCH + 5, 2] = value
    strategy = memory(in_flight=in_flight, forward_codec="multibit", backward_codec="stochastic")
    with pytest.raises(PipelineError, match="stage 0 in the forward of batch 3 holds"):
        fit(Model(), strategy, data)


def test_nan_that_only_the_codec_sees_is_refused_by_link_and_batch() -> None:
    """A frozen first stage has no gradient to protect, so nobody but the codec looks at its values."""
    model, data = Model(), make_data(6)
    for parameter in model.net[0].parameters():
        parameter.requires_grad_(False)
    data.tensors[0][3 * BATCH + 5, 2] = float("nan")
    strategy = memory(in_flight=4, forward_codec="multibit", backward_codec="stochastic")
    with pytest.raises(PipelineError, match=r"link from stage 0 to stage 1: .* of forward of batch 3: .*NaN"):
        fit(model, strategy, data)


def test_a_loss_that_is_not_finite_is_refused_by_link_and_batch() -> None:
    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 3 else 1.0)

    strategy = memory(in_flight=4, forward_codec="multibit", backward_codec="stochastic")
    with pytest.raises(PipelineError, match=r"link from stage 0 to stage 2: .* of backward of batch 3: .*NaN"):
        fit(Broken(), strategy, make_data(6))


# ----- figures


def test_bytes_and_errors_of_every_link_are_told() -> None:
    class Figures(L.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.stats = trainer.strategy.stats()

    figures = Figures()
    down, up = MultiBit(2), StochasticUniform(8)
    fit(Model(), memory(in_flight=1, forward_codec=down, backward_codec=up), make_data(5), callbacks=[figures])
    shapes = [(BATCH, WIDTH), (BATCH, WIDTH), (BATCH, CLASSES)]
    for number, (above, shape) in enumerate(zip((1, 2, 0), shapes, strict=True)):
        link = figures.stats[number]["links"]["down"]
        assert link["payload_bytes"] == 5 * down.wire_bytes(shape, 4)
        assert link["raw_bytes"] == 5 * 4 * shape[0] * shape[1]
        assert 0 < link["last_error"] < 0.5
        link = figures.stats[above]["links"]["up"]
        assert link["payload_bytes"] == 5 * up.wire_bytes(shape, 4)
        assert 0 < link["last_error"] < 0.01
