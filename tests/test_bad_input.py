"""What goes wrong is said at once, with what to change, and nothing is left behind."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import requests
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.graph import TraceError
from lightning_accept.pipeline.messages import PipelineError, StageFault, TransportError
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.pipeline.stage import NonFiniteActivation
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.local import LocalWorkers
from lightning_accept.remote.memory import MemoryCluster

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 4])


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5.0)
    assert not [thread.name for thread in left if thread.is_alive()]


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Model(L.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = make_net() if net is None else net

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.loss(self.net(x), target)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_data(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 3, (count,)))


def make_trainer(strategy: Any, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", **arguments},
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(module: L.LightningModule, strategy: Any, data: Any = None, batch_size: int = 4, **arguments: Any) -> L.Trainer:
    validation = arguments.pop("validation", None)
    loader = DataLoader(make_data() if data is None else data, batch_size)
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(module, loader, None if validation is None else DataLoader(validation, batch_size))
    return trainer


def assert_restored(module: L.LightningModule) -> None:
    """Nothing stands in for the user's methods any more."""
    assert not {"forward", "log", "_on_before_batch_transfer"} & set(vars(module))
    assert all("forward" not in vars(child) for child in module.modules())


def assert_free(cluster: MemoryCluster) -> None:
    for worker in cluster.workers:
        worker.claim("another run", "somebody else", "link")
        worker.release()


def fails(error: type[BaseException], module: L.LightningModule | None = None, **arguments: Any) -> str:
    """The message with which fit fails; asserts that everything is as it was before."""
    module = Model() if module is None else module
    options = {name: arguments.pop(name) for name in ("in_flight", "partition") if name in arguments}
    if "path" in arguments:
        options["module"] = arguments.pop("path")
    cluster = MemoryCluster(2, build_stage)
    with pytest.raises(error) as caught:
        fit(module, AccEPTStrategy(cluster.workers, **options), **arguments)
    assert_restored(module)
    assert_free(cluster)
    return str(caught.value)


# ----- numbers


@IN_FLIGHT
def test_nan_in_a_batch_names_stage_and_batch(in_flight: int) -> None:
    data = make_data()
    data.tensors[0][4 * 3 + 1, 2] = float("nan")
    message = fails(NonFiniteActivation, in_flight=in_flight, data=data)
    assert message == (
        "output 0 of stage 0 in the forward of batch 3 holds NaN; look at the input data and the learning rate"
    )


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


@IN_FLIGHT
def test_nan_that_arises_on_a_worker_names_stage_worker_and_batch(in_flight: int) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), Log(), nn.Linear(8, 3))
    message = fails(StageFault, Model(net), in_flight=in_flight, partition=["2", "4"])
    first = message.splitlines()[0]
    assert first.startswith("stage 1 (2")
    assert "on memory://1 failed in the forward of batch 0: NonFiniteActivation: output 0 of stage 1" in first
    assert "holds NaN" in first


@IN_FLIGHT
def test_nan_in_a_gradient_names_stage_and_batch(in_flight: int) -> None:
    class Rooted(Model):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - output.detach()).sum().sqrt() * 0.0

    message = fails(StageFault, Rooted(), in_flight=in_flight)
    assert "on memory://2 failed in the backward of batch 0" in message
    assert "gradient of output 0 of stage 2 in the backward of batch 0 holds NaN" in message


@IN_FLIGHT
@pytest.mark.parametrize(("place", "stage"), [(1, 0), (3, 1), (5, 2)])
def test_a_last_batch_of_one_with_batch_norm_is_plain_pytorchs_error_and_names_the_stage(
    place: int, stage: int, in_flight: int
) -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    net = nn.Sequential(*layers[:place], nn.BatchNorm1d(4), *layers[place:])
    partition, data = ["2", "4"], make_data(4 * 4 + 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as plain:
        fit(Model(net), "auto", data)
    message = fails(StageFault, Model(net), in_flight=in_flight, partition=partition, data=data)
    place_name = "central node" if stage == 0 else f"memory://{stage}"
    first = message.splitlines()[0]
    assert first.startswith(f"stage {stage} (")
    assert f"on {place_name} failed in the forward of batch 4: ValueError: {plain.value}" in first


# ----- modules


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = -h
        result: Tensor = self.second(h)
        return result


@IN_FLIGHT
def test_a_module_that_cannot_be_exported_names_the_users_line(in_flight: int) -> None:
    source, start = inspect.getsourcelines(Branching.forward)
    line = start + next(index for index, text in enumerate(source) if "if h.sum() > 0" in text)
    message = fails(TraceError, Model(Branching()), in_flight=in_flight)
    assert "cannot be exported in train mode: the value of a tensor decides what Python does next" in message
    assert f"{__file__}:{line}, in forward: if h.sum() > 0:" in message


@IN_FLIGHT
def test_a_training_step_that_never_calls_the_module(in_flight: int) -> None:
    class Idle(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum(p.sum() for p in self.net.parameters())  # type: ignore[return-value]

    message = fails(PipelineError, Idle(), in_flight=in_flight)
    assert message == (
        "training_step did not call the pipelined module net; name the one that it calls with"
        " AccEPTStrategy(module=...)"
    )


class TwoNets(Model):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)


def test_an_ambiguous_choice_lists_the_choices() -> None:
    message = fails(MisconfigurationException, TwoNets())
    assert message.endswith("say which one to pipeline with AccEPTStrategy(module=...): 'net', 'other'")


def test_a_path_that_leads_nowhere_lists_the_choices() -> None:
    message = fails(MisconfigurationException, TwoNets(), path="nett")
    assert message.endswith("TwoNets has no such module; its children with parameters are 'net', 'other'")


def test_an_input_that_requires_grad_in_flight() -> None:
    class Before(TwoNets):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, target = batch
            return self.loss(self.net(self.other(x)), target)

    message = fails(PipelineError, Before(), path="net", in_flight=4)
    assert message.startswith("an input of the pipelined module net requires grad. Pipeline a module that includes")
    assert "or set in_flight=1" in message


def test_several_calls_in_one_step_in_flight() -> None:
    class Twice(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, target = batch
            return self.loss(self.net(x) + self.net(x), target)

    message = fails(PipelineError, Twice(), in_flight=4)
    assert "calls the pipelined module net more than once; set AccEPTStrategy(in_flight=1)" in message


def test_too_few_layers_for_the_workers() -> None:
    message = fails(PipelineError, Model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))))
    assert message == ("net has 2 layers (0, 1), too few for 2 workers and the central node; use at most 1 workers")


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (["2"], "names 1 first layers, but there are 2 workers"),
        (["2", "nine"], "names layer 'nine'; the layers are 0, "),
        ([2, 2], "does not rise strictly from 1 to "),
        ([0, 2], "does not rise strictly from 1 to "),
        ([2, 99], "does not rise strictly from 1 to "),
        ([-2, -1], "does not rise strictly from 1 to "),
    ],
)
def test_a_partition_that_does_not_fit(partition: list[Any], message: str) -> None:
    assert message in fails(ValueError, partition=partition)


# ----- the Trainer's options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 2}, "uses one device on the central node, not 2 on 1 nodes; set Trainer(devices=1, num_nodes=1)"),
        ({"num_nodes": 2}, "uses one device on the central node, not 1 on 2 nodes"),
    ],
)
@IN_FLIGHT
def test_trainer_options_that_are_refused(arguments: dict[str, Any], message: str, in_flight: int) -> None:
    assert message in fails(MisconfigurationException, in_flight=in_flight, **arguments)


def test_loss_scaling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    message = fails(MisconfigurationException, plugins=[scaled])
    assert message.endswith("use 'bf16-mixed'")


@IN_FLIGHT
def test_lbfgs_is_refused(in_flight: int) -> None:
    class Second(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    assert "LBFGS evaluates the loss several times per step" in fails(
        MisconfigurationException, Second(), in_flight=in_flight
    )


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_in_flight_is_refused() -> None:
    message = fails(MisconfigurationException, Manual(), in_flight=4)
    assert message == "manual optimization needs AccEPTStrategy(in_flight=1), not in_flight=4"


class MyOptimizer(torch.optim.SGD):
    pass


@IN_FLIGHT
def test_an_optimizer_outside_torch_names_the_workers_option(in_flight: int) -> None:
    class Own(Model):
        def configure_optimizers(self) -> Any:
            return MyOptimizer(self.parameters(), lr=0.1)

    message = fails(PipelineError, Own(), in_flight=in_flight)
    assert f"start this worker with --allow-optimizer {MyOptimizer.__module__}.MyOptimizer" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": "http://here:7070"}, r"write workers=\['http://here:7070'\]"),
        ({"workers": 0}, "workers=0: at least one worker is needed"),
        ({"workers": []}, r"workers=\[\]: at least one worker is needed"),
        ({"workers": True}, "workers=True: at least one"),
        ({"in_flight": 0}, "in_flight=0: give 'auto' or a number from 1"),
        ({"in_flight": "many"}, "in_flight='many': give 'auto'"),
        ({"micro_batches": 0}, "micro_batches=0: give .auto. or a number from 1"),
        ({"compress_output": "yes"}, "compress_output='yes': give 'auto', True or False"),
        ({"partition": "equal"}, "partition='equal': give 'auto' or the first layer"),
        ({"forward_codec": "zip"}, "zip"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AccEPTStrategy(**arguments)


# ----- workers


def test_a_worker_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        module = Model()
        with pytest.raises(TransportError) as caught:
            fit(module, AccEPTStrategy([url], token="t", timeout=0.2))
    assert f"worker {url} could not be reached for the claim within 0.2 s" in str(caught.value)
    assert f"start it there with: lightning-accept worker --port {url.rsplit(':', 1)[1]}" in str(caught.value)
    assert_restored(module)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalWorkers]:
    with LocalWorkers(2, threads=1, device="cpu") as workers:
        yield workers


def holder_of(url: str, token: str) -> Any:
    reply = requests.get(f"{url}/status", headers={"Authorization": f"Bearer {token}"}, timeout=30)
    return reply.json()["holder"]


def test_a_wrong_token(local: LocalWorkers) -> None:
    with pytest.raises(PipelineError, match=r"refused the claim: .*check token=\.\.\., it must be what the worker"):
        fit(Model(), AccEPTStrategy(local.urls, token="wrong"))
    assert [holder_of(url, local.token) for url in local.urls] == [None, None]


def test_no_token(local: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ACCEPT_TOKEN", raising=False)
    with pytest.raises(ValueError, match="token"):
        fit(Model(), AccEPTStrategy(local.urls))
    monkeypatch.setenv("LIGHTNING_ACCEPT_TOKEN", local.token)
    fit(Model(), AccEPTStrategy(local.urls), max_steps=1)


def test_a_second_run_is_told_who_holds_the_worker_and_since_when(local: LocalWorkers) -> None:
    other = HttpWorker(local.urls[1], local.token, timeout=30.0)
    other.claim("other-run", "ada@engine (process 7)", "link")
    try:
        with pytest.raises(PipelineError) as caught:
            fit(Model(), AccEPTStrategy(local.urls, token=local.token))
        since = holder_of(local.urls[1], local.token)["since"]
        # The first worker was claimed already, and is free again.
        assert holder_of(local.urls[0], local.token) is None
    finally:
        other.close()
        other.release()
    assert f"worker {local.urls[1]} is busy: held by ada@engine (process 7) (run other-run) since {since}" in str(
        caught.value
    )


def test_two_runs_at_once_name_this_process(local: LocalWorkers) -> None:
    class Nested(L.Callback):
        message = ""

        def on_train_batch_end(self, *args: Any) -> None:
            if not self.message:
                with pytest.raises(PipelineError) as caught:
                    fit(Model(), AccEPTStrategy(local.urls, token=local.token))
                self.message = str(caught.value)

    nested = Nested()
    fit(Model(), AccEPTStrategy(local.urls, token=local.token), callbacks=[nested])
    assert f"(process {os.getpid()})" in nested.message


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the discard port: nothing answers there
    # Embedded workers inherit them, and talk to each other too.
    trainer = fit(Model(), AccEPTStrategy(2, worker_threads=1, timeout=10.0))
    assert trainer.global_step == 6


class KillAt(L.Callback):
    def __init__(self, pid: int, batch: int) -> None:
        self.pid = pid
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            os.kill(self.pid, signal.SIGKILL)


@pytest.mark.parametrize(("victim", "in_flight"), [(0, 4), (1, 1)])
def test_a_worker_killed_in_the_middle_of_an_epoch(victim: int, in_flight: int) -> None:
    with LocalWorkers(2, threads=1, device="cpu") as workers:
        module = Model()
        strategy = AccEPTStrategy(workers.urls, token=workers.token, in_flight=in_flight, timeout=4.0)
        with pytest.raises(PipelineError) as caught:
            fit(module, strategy, make_data(400), callbacks=[KillAt(workers.pids[victim], 5)])
        assert workers.urls[victim] in str(caught.value)
        assert "could not be reached" in str(caught.value)
        assert holder_of(workers.urls[1 - victim], workers.token) is None
        assert_restored(module)


# ----- the user's own errors


class OwnError(Exception):
    pass


@IN_FLIGHT
@pytest.mark.parametrize("error", [OwnError, SystemExit])
@pytest.mark.parametrize("where", ["before", "after", "validation before", "validation after", "loss"])
def test_an_error_of_the_users_own_code_passes_unchanged(
    where: str, error: type[BaseException], in_flight: int
) -> None:
    raised = error("mine")

    class Failing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if where == "before" and batch_idx == 3:
                raise raised
            loss = super().training_step(batch, batch_idx)
            if where == "after" and batch_idx == 3:
                raise raised
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if where == "validation before" and batch_idx == 1:
                raise raised
            self.net(batch[0])
            if where == "validation after" and batch_idx == 1:
                raise raised

        def on_before_backward(self, loss: Tensor) -> None:
            if where == "loss" and self.trainer.global_step == 2:
                raise raised

    cluster = MemoryCluster(2, build_stage)
    module = Failing()
    with pytest.raises(error) as caught:
        fit(module, AccEPTStrategy(cluster.workers, in_flight=in_flight), validation=make_data(12))
    assert caught.value is raised
    assert_restored(module)
    assert_free(cluster)


@pytest.fixture
def sigint() -> Iterator[None]:
    """Lightning ignores further interrupts once it handles one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@IN_FLIGHT
@pytest.mark.parametrize("where", ["step before", "step after", "callback", "waiting", "validation"])
def test_an_interrupt_keeps_what_was_trained_and_releases_everything(where: str, in_flight: int, sigint: None) -> None:
    cluster = MemoryCluster(2, build_stage)

    class Interrupted(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if where == "step before" and batch_idx == 3:
                raise KeyboardInterrupt
            loss = super().training_step(batch, batch_idx)
            if where == "step after" and batch_idx == 3:
                raise KeyboardInterrupt
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])
            if where == "validation" and not self.trainer.sanity_checking:
                raise KeyboardInterrupt

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if where == "callback" and batch_idx == 3:
                raise KeyboardInterrupt
            if where == "waiting" and batch_idx == 3:
                pipeline = self.trainer.strategy._pipeline
                pipeline.output = lambda ticket: os.kill(os.getpid(), signal.SIGINT) or threading.Event().wait()

    module = Interrupted()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(SystemExit):
        fit(module, AccEPTStrategy(cluster.workers, in_flight=in_flight), validation=make_data(12))
    for name, parameter in module.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert_restored(module)
    assert_free(cluster)


def test_the_trainer_trains_on_after_an_error() -> None:
    """Nothing of a failed run is left in the strategy."""
    cluster = MemoryCluster(2, build_stage)
    strategy = AccEPTStrategy(cluster.workers, in_flight=4)
    trainer = make_trainer(strategy)
    module = Model()
    bad = make_data()
    bad.tensors[0][5] = float("nan")
    with pytest.raises(NonFiniteActivation):
        trainer.fit(module, DataLoader(bad, 4))
    trainer.fit(module, DataLoader(make_data(), 4))
    assert trainer.global_step == 6
