"""What once broke."""

from __future__ import annotations

import copy
import threading
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accept import AccEPTStrategy
from lightning_accept.partition.choose import choose_schedule
from lightning_accept.partition.model import Hop, PipelineModel, StageModel
from lightning_accept.partition.simulator import simulate
from lightning_accept.pipeline.messages import PipelineError, StageFault
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.pipeline.stage import Job, job_seed
from lightning_accept.remote.memory import MemoryCluster

raw_strategy = partial(AccEPTStrategy, forward_codec="raw", backward_codec="raw")
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 4])


class Model(L.LightningModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layers or (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def in_memory(in_flight: Any = 1, **options: Any) -> AccEPTStrategy:
    return raw_strategy(MemoryCluster(2, build_stage).workers, in_flight=in_flight, **options)


def fit(module: Any, strategy: Any, data: Any = None, **arguments: Any) -> Any:
    trainer = L.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", **arguments},
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(make_data(), 4) if data is None else data)
    return module


def train(cls: Any, strategy: Any, data: Any = None, **arguments: Any) -> Any:
    L.seed_everything(3, verbose=False)
    return fit(cls(), strategy, data, **arguments)


def assert_equals_plain(cls: Any, data: Any = None, *, tolerance: float = 0.0, **arguments: Any) -> None:
    options = arguments.pop("options", {})
    plain = train(cls, "auto", data, **arguments).state_dict()
    ours = train(cls, in_memory(**options), data, **arguments).state_dict()
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


class Manual(Model):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.automatic_optimization = False


def test_a_step_that_waits_for_its_output_was_left_suspended_when_a_stage_failed() -> None:
    """Its thread stayed alive for ever: only steps ahead of their turn were unwound, not the one in hand."""

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    module = Model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), Log(), nn.Linear(8, 3))
    with pytest.raises(StageFault, match="holds NaN"):
        fit(module, in_memory(4))
    assert "training_step" not in [thread.name for thread in threading.enumerate()]


@IN_FLIGHT
def test_an_error_in_stage_0_did_not_name_the_stage(in_flight: int) -> None:
    module = Model(nn.Linear(4, 4), nn.BatchNorm1d(4), *(nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(StageFault, match=r"stage 0 \(.*\) on central node failed .*Expected more than 1 value per"):
        fit(module, in_memory(in_flight), DataLoader(make_data(5), 4))


@pytest.mark.parametrize(("arguments", "message"), [({"devices": 2}, "not 2 on 1"), ({"num_nodes": 2}, "not 1 on 2")])
def test_more_devices_or_nodes_were_silently_ignored(arguments: dict[str, Any], message: str) -> None:
    """Lightning tells a strategy of a single device of one device only, whatever the Trainer was asked for."""
    with pytest.raises(MisconfigurationException, match=message):
        fit(Model(), in_memory(), **arguments)


class Convolutions(Model):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 3, padding=1), nn.Tanh()),
            *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)),
        )


def lengths(*sizes: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(3, 2, size, generator=generator), torch.tensor([0, 1, 2])) for size in sizes]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"in_flight": 4, "sync_warmup_steps": 99}], ids=["sync", "in flight"])
def test_a_new_trace_within_gradient_accumulation_lost_the_gradients_so_far(options: dict[str, Any]) -> None:
    """A batch of another length puts new stages in place, without what the old ones had added up."""
    data = lengths(5, 6, 6, 5)
    assert_equals_plain(Convolutions, data, accumulate_grad_batches=2, tolerance=1e-6, options=options)


@pytest.mark.parametrize("of", ["self", "self.net"])
def test_zero_grad_of_a_module_left_the_gradients_of_the_workers(of: str) -> None:
    class ZeroedByModule(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            (self if of == "self" else self.net).zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()  # type: ignore[union-attr]

    assert_equals_plain(ZeroedByModule)


def test_a_forward_of_the_instance_was_ignored_and_then_lost() -> None:
    """Some libraries wrap ``module.forward`` on the instance."""

    class Wrapped(Model):
        def __init__(self) -> None:
            super().__init__()
            inner = self.net.forward
            self.net.forward = lambda x: inner(x) * 0.5  # type: ignore[method-assign]
            self.wrapper = self.net.forward

    assert_equals_plain(Wrapped)
    module = train(Wrapped, in_memory())
    assert module.net.forward is module.wrapper


def test_a_method_replaced_on_the_instance_was_lost() -> None:
    module = Model()
    own = module.log
    module.log = own  # type: ignore[method-assign]
    fit(module, in_memory(4))
    assert vars(module)["log"] is own


@IN_FLIGHT
def test_a_module_in_eval_mode_was_trained_in_train_mode(in_flight: int) -> None:
    """With one batch in flight its loss did not require grad; with more, BatchNorm worked as if training."""

    class Eval(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.net.eval()
            return super().training_step(batch, batch_idx)

    with pytest.raises(PipelineError, match="net is to be trained in eval mode, but the pipeline"):
        fit(Eval(), in_memory(in_flight))


def test_a_second_backward_through_one_call_was_a_fault_of_the_last_stage() -> None:
    class Twice(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)

    with pytest.raises(PipelineError, match="backward was called twice through the pipelined call of batch 0; add the"):
        fit(Twice(), in_memory())


def test_second_derivatives_through_the_pipeline_were_taken_for_zero() -> None:
    class Penalty(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            x = batch[0].requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            self.manual_backward(super().training_step(batch, batch_idx) + gradient.square().sum())

    with pytest.raises(PipelineError, match="create_graph=True asks for second derivatives of the pipelined"):
        fit(Penalty(), in_memory())


def test_clip_gradients_clipped_what_the_central_node_holds_only() -> None:
    class Clipping(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()
            optimizer.zero_grad()

    class Configured(Model):
        def configure_gradient_clipping(self, optimizer: Any, **arguments: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    for cls in (Clipping, Configured):
        assert_equals_plain(cls, tolerance=1e-6)


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averaging_callbacks_averaged_weights_that_were_out_of_date(name: str) -> None:
    callback = getattr(L.pytorch.callbacks, name, None)
    if callback is None:
        pytest.skip("this Lightning has no such callback")
    average = callback(swa_lrs=0.05) if name.startswith("Stochastic") else callback()
    with pytest.raises(MisconfigurationException, match=f"{name} averages the weights on the central node"):
        fit(Model(), in_memory(), callbacks=[average])


def test_neighbouring_micro_batches_drew_the_same_dropout() -> None:
    """Half of all pairs of micro-batches 2n and 2n + 1 shared their seed."""
    seeds = [job_seed(0, 1, Job(0, batch, micro)) for batch in range(50) for micro in range(4)]
    assert len(set(seeds)) == len(seeds)


def test_a_copy_of_the_pipelined_module_failed_over_a_lock() -> None:
    class Copying(Model):
        def on_train_epoch_end(self) -> None:
            copy.deepcopy(self.net)

    with pytest.raises(PipelineError, match="net cannot be copied while it is pipelined"):
        fit(Copying(), in_memory())


OPTIMIZER = """
import torch
class Slow(torch.optim.SGD):
    pass
"""


def test_embedded_workers_refused_an_optimizer_outside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They named an option of the daemon that their user has no way to set."""
    (tmp_path / "slow_optimizer.py").write_text(OPTIMIZER)
    monkeypatch.syspath_prepend(tmp_path)
    import slow_optimizer

    class Own(Model):
        def configure_optimizers(self) -> Any:
            return slow_optimizer.Slow(self.parameters(), lr=0.1, momentum=0.9)

    plain = train(Own, "auto").state_dict()
    ours = train(Own, raw_strategy(1, in_flight=1, worker_threads=1)).state_dict()
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"in_flight": 4, "sync_warmup_steps": 99}], ids=["sync", "in flight"])
def test_parameters_frozen_or_unfrozen_while_training_stayed_as_they_were_on_the_workers(
    options: dict[str, Any],
) -> None:
    class Thawing(Model):
        def on_train_epoch_start(self) -> None:
            for index in (0, 2, 4):
                self.net[index].requires_grad_(self.current_epoch == index // 2)

    assert_equals_plain(Thawing, max_epochs=3, tolerance=1e-6, options=options)


@pytest.mark.parametrize("options", [{}, {"in_flight": 4, "sync_warmup_steps": 99}], ids=["sync", "in flight"])
def test_a_param_group_added_while_training_was_a_fault(options: dict[str, Any]) -> None:
    """As Lightning's BackboneFinetuning does."""

    class Growing(Model):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.optimizers().add_param_group({"params": [*self.net[2].parameters()], "lr": 0.02})  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            parameters = [*self.net[0].parameters(), *self.net[4].parameters()]
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    assert_equals_plain(Growing, max_epochs=2, tolerance=1e-6, options=options)


@IN_FLIGHT
def test_users_who_iterate_over_the_trainers_dataloaders_got_handles_and_ended_the_epoch(in_flight: int) -> None:
    """Callbacks do that to pick samples for a picture."""

    class Looking(Model):
        def __init__(self) -> None:
            super().__init__()
            self.looked: list[Any] = []
            self.trained = 0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trained += 1
            for loaders in (self.trainer.train_dataloader, self.trainer.val_dataloaders):
                self.looked.append(next(iter(loaders)))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    module = Looking()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        strategy=in_memory(in_flight),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(make_data(), 4), DataLoader(make_data(8), 4))
    assert module.trained == 12
    assert all(isinstance(x, Tensor) and x.shape == (4, 4) for x, _ in module.looked)


def test_a_state_gathered_right_after_the_last_step_lacked_it() -> None:
    """Commands overtook packets that had arrived before them."""
    for _ in range(5):
        assert_equals_plain(Model, DataLoader(make_data(3), 4))


@IN_FLIGHT
def test_configure_optimizers_that_asks_for_the_number_of_steps_failed(in_flight: int) -> None:
    """It loads the dataloaders before the strategy has set itself up."""

    class Asking(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    fit(Asking(), in_memory(in_flight), max_epochs=2)


class Normed(Model):
    """BatchNorm on every stage; with a learning rate of 0 its statistics depend on the batches alone."""

    def __init__(self) -> None:
        blocks = [(nn.Linear(first, 8), nn.BatchNorm1d(8)) for first in (4, 8, 8)]
        super().__init__(*(layer for block in blocks for layer in block), nn.Linear(8, 3))
        self.saved: dict[str, Tensor] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            state = self.trainer.strategy.lightning_module_state_dict()
            self.saved = {name: tensor.clone() for name, tensor in state.items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_statistics_in_a_checkpoint_counted_batches_in_flight_which_a_resumed_run_counted_again() -> None:
    plain, ours = train(Normed, "auto"), train(Normed, in_memory(4, partition=[1, 2]))
    torch.testing.assert_close(ours.saved, plain.saved, rtol=1e-6, atol=1e-6)
    assert {int(t) for name, t in ours.saved.items() if name.endswith("tracked")} == {3}
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_statistics_counted_batches_that_were_begun_but_never_trained(micro_batches: int) -> None:
    """As when a callback ends the epoch early."""

    class EndsEarly(Normed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    module = train(EndsEarly, in_memory(4, partition=[1, 2], micro_batches=micro_batches))
    assert {int(t) for name, t in module.state_dict().items() if name.endswith("tracked")} == {3 * micro_batches}
    if micro_batches == 1:
        plain = train(EndsEarly, "auto")
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_small_batch_that_was_dropped_was_a_fault_of_a_worker() -> None:
    """Of its micro-batches one was empty, and had never been forwarded."""

    class Skipping(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if len(batch[0]) == 1 else loss

    train(Skipping, in_memory(4, micro_batches=2), DataLoader(make_data(9), 4))


def test_chosen_schedules_are_as_fast_in_the_long_run() -> None:
    """Two equal gaps between batches counted as the steady state, though every third was 1.66 times as long.

    The planner then chose a schedule whose batches took 1.22 times what it expected.
    """
    stages = (StageModel(0.214, 0.42), StageModel(0.067, 0.478), StageModel(0.099, 0.401))
    hops = (Hop(0.416, 0.416), Hop(0.175, 0.174), Hop(0.013, 0.013))
    model = PipelineModel(stages, hops)
    choice = choose_schedule(model, min_in_flight=2)
    losses = simulate(model, choice.schedule, 400).losses
    assert (losses[380] - losses[80]) / 300 == pytest.approx(choice.period, rel=0.01)
    assert choice.period <= 1.03 * model.least_period(1)
