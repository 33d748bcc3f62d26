"""AccEPTStrategy: Lightning's hooks, translated into calls on the pipeline."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accept.choose import choose_module
from lightning_accept.clipping import watch_clipping
from lightning_accept.codecs import Codec, make_codec
from lightning_accept.codecs.defaults import default_backward, default_forward
from lightning_accept.horizon import TrainingHorizon
from lightning_accept.latency.base import LatencyModel
from lightning_accept.latency.choose import latency_factory
from lightning_accept.latency.profile import run_profile
from lightning_accept.partition.forecast import Forecast
from lightning_accept.partition.plan import Plan
from lightning_accept.partition.schedule import Schedule, default_schedule
from lightning_accept.pipeline.batch_clock import BatchClock
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.device_times import DeviceTimes
from lightning_accept.pipeline.event_feed import EventFeed
from lightning_accept.pipeline.foresight import Foresight, Wishes
from lightning_accept.pipeline.lookahead import Feed, Handle, LookAheadLoader, begin_ahead
from lightning_accept.pipeline.messages import PipelineError, StageReport
from lightning_accept.pipeline.module import PipelinedModule
from lightning_accept.pipeline.moves import MoveReport
from lightning_accept.pipeline.optimizers import foreign_classes, hyper_parameters
from lightning_accept.pipeline.suspended import SuspendedStep
from lightning_accept.pipeline.ticket import Ticket, Update
from lightning_accept.pipeline.transport import WorkerHandle
from lightning_accept.progress_bars import progress_line
from lightning_accept.refusals import check_optimizers, check_trainer
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.facts import facts
from lightning_accept.remote.local import LocalWorkers
from lightning_accept.stand_ins import StandIns, watch_module, watch_zero_grad

log = logging.getLogger("lightning_accept")


class AccEPTStrategy(SingleDeviceStrategy):
    """Trains one LightningModule through an asynchronous pipeline of workers (AccEPT, arXiv 2311.05827).

    This process is the central node: it runs the Trainer, owns the data, computes the loss and holds stage 0. Every
    worker holds one later stage.

    Gradients are clipped over all stages, however Lightning or the user asks for it. By value, every stage clips its
    own, which is exact. By norm, it is exact with one batch in flight. With more, each stage uses the exact norms, for
    the same batch, of itself and of the stages behind it, which the gradient brings along; and for the stages before it
    the norms of the newest batch that the central node had completed when the gradient left. Which batch that is
    follows from the schedule alone. Until the first one is known, such a stage counts as much as the largest known one.
    No message of its own is sent.

    Args:
        workers: URLs of running workers, in the order of their stages; or a number of workers to start on this
            machine, which end with the trainer.
        module: Dotted path of the module to pipeline. By default the LightningModule itself if it defines forward,
            else its only child with parameters.
        in_flight: Batches begun and not fully backwarded. 1 is the synchronous mode, equal to training on one device;
            more keep all stages busy at the price of weights that are up to ``in_flight - 1`` updates old. ``auto``
            takes the fewest, from 2 on, with which the simulated pipeline is within 3 % of its best speed; where
            devices are not measured, the number of workers plus 2; for manual optimization, 1.
        micro_batches: Parts into which every batch is split inside the pipeline. BatchNorm then sees each part alone.
            ``auto`` chooses as for ``in_flight`` if devices are measured and the model has no BatchNorm, else 1.
        partition: ``auto`` for the best one by what is known of the devices (see ``latency``), or the first layer of
            every worker's stage, by index or name.
        latency: How the devices' times are known. ``flops``: not at all, every stage gets equal work. ``measured``:
            every layer is measured on every device, and every link, before the first batch. ``capacity``: the same on
            the central node, and one ratio for each worker (FTPipeHD). The path of a file that ``lightning-accept
            pretrain`` wrote: few sub-models are measured, the rest is predicted (AccEPT). ``auto`` is ``measured`` for
            workers given by URL and ``flops`` for workers started on this machine.
        leave_out: Whether workers may be left without a stage if the pipeline is faster so.
        check_plan: Where devices are measured: also measure the stages of the plan, on all devices at the same time,
            before it is put in place. A few runs of each; what comes of it may change the plan.
        forward_codec: Codec for activations: a name or an instance. ``auto`` is ``MultiBit(4, levels="signed")``, the
            choice of ``benchmarks/convergence.py``; ``raw`` changes nothing.
        backward_codec: Codec for gradients, likewise; ``auto`` is ``StochasticUniform(8)``.
        eval_codec: Codec for activations in validation, test and predict.
        compress_output: Whether the module's output and its gradient go through these codecs too. ``auto`` compresses
            them unless they are small against what crosses the cuts before them, as a classifier's logits are: the
            loss is computed from them, and rounding them saves next to nothing.
        weight_prediction: Forward batches in flight with the weights expected when their update comes.
        scale_lr_by_staleness: Divide the learning rate of each stage by the number of updates that its weights lacked
            in the forward (the first technique of PipeMare, arXiv 1910.05124, but throughout). The optimizer's own
            learning rate, and what schedulers and loggers see, stay as they are.
        sync_warmup_steps: Optimizer steps at the start of training with one batch in flight only. A learning rate that
            is too high for the staleness is so afterwards, too.
        token: The workers' bearer token; by default the environment's ``LIGHTNING_ACCEPT_TOKEN``. Embedded workers get
            a random one.
        cafile: Certificates that HTTPS workers are checked against; by default the system's.
        timeout: Seconds within which a worker must answer before it counts as lost.
        batch_timeout: Seconds within which a batch must come back.
        worker_threads: Threads of each embedded worker; by default the cores are divided among them and this process.
        device: Device of the central node, for stage 0 and the loss; by default what the Trainer's ``accelerator``
            says.
    """

    strategy_name = "accept"

    def __init__(
        self,
        workers: int | Sequence[str | WorkerHandle] = 2,
        module: str | None = None,
        in_flight: int | str = "auto",
        micro_batches: int | str = 1,
        partition: str | Sequence[int | str] = "auto",
        latency: str | LatencyModel = "auto",
        leave_out: bool = False,
        check_plan: bool = True,
        forward_codec: str | Codec = "auto",
        backward_codec: str | Codec = "auto",
        eval_codec: str | Codec = "raw",
        compress_output: bool | str = "auto",
        weight_prediction: bool = True,
        scale_lr_by_staleness: bool = False,
        sync_warmup_steps: int = 0,
        token: str | None = None,
        cafile: str | None = None,
        timeout: float = 60.0,
        batch_timeout: float = 900.0,
        worker_threads: int | None = None,
        device: str | torch.device = "auto",
    ) -> None:
        super().__init__(device="cpu" if device == "auto" else device)
        self.parallel_devices: list[torch.device] | None = None
        """Set by the Trainer to what its ``accelerator`` and ``devices`` amount to."""
        self.num_nodes = 1
        """Set by the Trainer to its ``num_nodes``."""
        self._auto_device = device == "auto"
        if isinstance(workers, str):
            raise ValueError(f"workers must be a list of URLs or a number; write workers=[{workers!r}]")
        if isinstance(workers, bool) or (isinstance(workers, int) and workers < 1) or not workers:
            raise ValueError(f"workers={workers!r}: at least one worker is needed")
        if not (in_flight == "auto" or (isinstance(in_flight, int) and in_flight >= 1)):
            raise ValueError(f"in_flight={in_flight!r}: give 'auto' or a number from 1")
        if not (micro_batches == "auto" or (isinstance(micro_batches, int) and micro_batches >= 1)):
            raise ValueError(f"micro_batches={micro_batches!r}: give 'auto' or a number from 1")
        if compress_output not in (True, False, "auto"):
            raise ValueError(f"compress_output={compress_output!r}: give 'auto', True or False")
        if isinstance(partition, str) and partition != "auto":
            raise ValueError(f"partition={partition!r}: give 'auto' or the first layer of every worker's stage")
        self._worker_places = workers
        self._module_path = module
        self._in_flight = in_flight
        self._micro_batches = micro_batches
        self._partition = partition
        self._latency = latency_factory(_default_latency(workers) if latency == "auto" else latency)
        self._leave_out = leave_out
        self._check_plan = check_plan
        self._codecs = {
            "forward_codec": default_forward() if forward_codec == "auto" else make_codec(forward_codec),
            "backward_codec": default_backward() if backward_codec == "auto" else make_codec(backward_codec),
            "eval_codec": make_codec(eval_codec),
        }
        self._compress_output = None if compress_output == "auto" else bool(compress_output)
        self._weight_prediction = weight_prediction
        self._scale_lr = scale_lr_by_staleness
        self._sync_warmup_steps = sync_warmup_steps
        self._token = token
        self._cafile = cafile
        self._timeout = timeout
        self._batch_timeout = batch_timeout
        self._worker_threads = worker_threads
        self._local: LocalWorkers | None = None
        self._pipelined: PipelinedModule | None = None
        self._pipeline: CentralPipeline | None = None
        self._schedule: Schedule | None = None
        self._clock: BatchClock | None = None
        self._horizon: TrainingHorizon | None = None
        self._feeds: dict[str, Feed] = {}
        self._in_hand: Handle | None = None
        self._at_work: Handle | None = None
        self._live: tuple[Ticket, list[Tensor]] | None = None
        self._sending: Callable[[Update | None], None] | None = None
        self._stepping = False
        self._drain_after = False
        self._stand_ins = StandIns()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="AccEPT: pipeline of remote workers over HTTP")

    @property
    @override
    def root_device(self) -> torch.device:
        if self._auto_device and self.parallel_devices:
            return self.parallel_devices[0]
        return super().root_device

    # ----- life

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self._trainer = trainer
        module, name = choose_module(self.lightning_module, self._module_path)
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainer(trainer, None if self._in_flight == "auto" else int(self._in_flight))
        # configure_optimizers may ask for the dataloaders, which must know whether batches will be in flight.
        self._schedule = self._make_schedule()
        super().setup(trainer)
        check_optimizers(self.optimizers)
        progress = progress_line(trainer)
        try:
            handles = self._make_workers()
            settings = Settings(
                **self._codecs,
                weight_prediction=self._weight_prediction,
                seed=torch.initial_seed() % 2**63,
                compress_output=self._compress_output,
                scale_lr=self._scale_lr,
            )
            self._pipeline = CentralPipeline(
                handles,
                settings,
                device=self.root_device,
                timeout=self._timeout,
                batch_timeout=self._batch_timeout,
                progress=progress,
            )
            facts_of_workers = self._pipeline.connect(_holder())
        except BaseException:
            self._close_pipeline()
            raise
        foresight = None
        # Outside fit there is nothing to gain: partition and depth matter over many batches.
        if self._latency is not None and trainer.state.fn == TrainerFn.FITTING:
            own = facts(self.root_device, torch.get_num_threads())
            times = DeviceTimes(
                self._latency,
                [own, *facts_of_workers],
                run_profile,
                crowded=self._local is not None,
                progress=progress,
            )
            wishes = Wishes(
                _chosen(self._in_flight, self._schedule),
                _number(self._micro_batches),
                self._leave_out,
                self._check_plan,
            )
            foresight = Foresight(times, wishes, progress=progress)
        self._pipelined = PipelinedModule(
            module, name, self._pipeline, self._schedule, self._partition, lambda: self.optimizers, foresight
        )
        self._clock = BatchClock(self._pipeline)
        self._pipelined.install()
        watch_module(self._stand_ins, self.lightning_module)
        watch_clipping(self._stand_ins, self.precision_plugin, self._pipeline.clipping, self._index)
        if self._synchronous:
            faces = [list(pair) for pair in zip(self.optimizers, self._lightning_optimizers, strict=True)]
            watch_zero_grad(self._stand_ins, [self.lightning_module, module], faces, self._pipeline.zero_gradients)
        if trainer.state.fn == TrainerFn.FITTING:
            self._horizon = TrainingHorizon(trainer, self._sync_warmup_steps)

    @override
    def teardown(self) -> None:
        self._close_pipeline()
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._abandon_steps()
        if isinstance(exception, KeyboardInterrupt):
            if self._pipeline is not None:
                self._pipeline.batch_timeout = min(self._batch_timeout, self._timeout)  # somebody waits for the prompt
            try:
                self._gather()
            except PipelineError as error:
                log.warning("weights trained since the last checkpoint could not be gathered: %s", error)
        self._close_pipeline()

    @override
    def on_train_end(self) -> None:
        self._leave_training()
        self._gather()

    # ----- data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._trainer.training and self._synchronous:
            return dataloader
        return LookAheadLoader(dataloader, self._new_feed)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, Handle):
            self._in_hand = batch
            self._open(batch, dataloader_idx)
            return batch.batch
        self._in_hand = None
        return super().batch_to_device(batch, device, dataloader_idx)

    def _new_feed(self, feed: Feed) -> None:
        """A new pass over a dataloader begins: what an earlier one began and nobody took up is dropped."""
        if self._trainer.training:
            self._leave_training()
            self._feeds["training"] = feed
        else:
            self._feeds["evaluation"] = feed

    def _open(self, handle: Handle, dataloader_idx: int) -> None:
        if handle.opened:
            return
        assert self.lightning_module is not None
        handle.opened = True
        batch = self.precision_plugin.convert_input(handle.raw)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        handle.batch = super().batch_to_device(batch, None, dataloader_idx)
        handle.raw = None

    # ----- training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._pipeline is not None and self._pipelined is not None
        self._pipeline.epoch = self._trainer.current_epoch
        self._note_batch()
        if self._synchronous:
            self._pipeline.abandon()  # forwards of earlier steps that were never backwarded
            calls = self._pipelined.calls
            result = super().training_step(*args, **kwargs)
            if self._pipelined.calls == calls:
                self._refuse_uncalled("training_step")
            return result
        assert self._horizon is not None
        handle = self._take_in_hand(args)
        limit = self._horizon.batches_ahead(handle.feed)
        lead = self.schedule.forward_lead - 1
        more = begin_ahead(
            handle, int(min(limit, lead)), lambda batch, ahead: self._begin("training_step", batch, args, ahead)
        )
        begun = len(handle.feed.started()) if handle.feed is not None else 0
        if not more or limit <= begun:
            self._pipeline.flush()
        self._drain_after = begun == 0 and (limit <= 0 or not more)
        self._horizon.hold(handle.feed, begun)
        assert handle.step is not None and handle.ticket is not None
        output, leaves = self._pipelined.output(handle.ticket)
        self._live = (handle.ticket, leaves)
        result = handle.step.resume(output)
        if result is None or (isinstance(result, Mapping) and result.get("loss") is None):
            self._leave_hand(partial(self._pipeline.skip, handle.ticket))
        return result

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if not self._synchronous:
            assert self._pipeline is not None and self._live is not None
            ticket, leaves = self._live
            self._leave_hand(partial(self._pipeline.backward, ticket, [leaf.grad for leaf in leaves]))
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        assert self._pipeline is not None and self._pipelined is not None
        if self._synchronous:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
            if self._pipeline.deployed:  # not if the step never called the pipelined module
                self._pipeline.step([[self._index(optimizer), hyper_parameters(optimizer)]])
            return result
        self._stepping, self._sending = True, None
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._stepping = False
        send, self._sending, self._live = self._sending, None, None
        if send is None:
            raise PipelineError(
                "optimizer.step() was called without the closure that LightningModule.optimizer_step is given; pass"
                " optimizer_closure to it, or set AccEPTStrategy(in_flight=1)"
            )
        send([[0, hyper_parameters(self.optimizers[0])]])
        self._complete_lagging()
        return result

    def _begin(self, hook: str, handle: Handle, args: tuple[Any, ...], ahead: int) -> bool:
        """Start the user's step for a batch and put it in flight; False if it must wait for its turn."""
        assert self._pipeline is not None and self._pipelined is not None
        if ahead and not handle.opened:
            self._open(handle, 0)
        if handle.batch is None:
            return True  # Lightning passes over it
        if handle.step is None:
            handle.step = self._suspend(hook, self._step_args(hook, handle, args, ahead))
            handle.step.start()
        call = handle.step.call
        if call is None:
            self._refuse_uncalled(hook)
        assert call is not None
        if not self._pipelined.accepts(call):
            if ahead:
                return False
            self._pipeline.settle()
        updates = self._horizon.updates(handle.feed, ahead) if self._horizon is not None else True
        handle.ticket = self._pipelined.begin(call, updates)
        return True

    def _suspend(self, hook: str, args: tuple[Any, ...]) -> SuspendedStep:
        step = getattr(super(), hook)
        return SuspendedStep(lambda: step(*args), name=hook)

    def _step_args(self, hook: str, handle: Handle, args: tuple[Any, ...], ahead: int) -> tuple[Any, ...]:
        """The arguments of the step ``ahead`` batches from now, made from those of the step in hand."""
        rest = list(args[1:])
        function = getattr(self.lightning_module, hook)
        if rest and is_param_in_hook_signature(function, "batch_idx", min_args=2):
            rest[0] += ahead
        return (handle.batch, *rest)

    def _take_in_hand(self, args: tuple[Any, ...]) -> Handle:
        handle, self._in_hand = self._in_hand, None
        if handle is None:
            handle = Handle(None, None)
            handle.opened, handle.batch = True, args[0]
        if handle.feed is not None:
            handle.feed.take(handle)
        self._at_work = handle
        return handle

    def _leave_hand(self, send: Callable[[Update | None], None]) -> None:
        """Send the gradient of the batch in hand.

        If it ends with an optimizer step, only once that is taken here: hooks may clip gradients and set options first.
        """
        if self._stepping:
            self._sending = send
            return
        send(None)
        self._complete_lagging()

    def _complete_lagging(self) -> None:
        """Finish on stage 0 what has fallen behind by more than the schedule allows."""
        assert self._pipeline is not None
        self._pipeline.complete_lagging(0 if self._drain_after else self.schedule.backward_lag)

    def _leave_training(self) -> None:
        """Drain the pipeline. Batches begun that will not be trained are dropped, which only an interruption causes."""
        self._abandon_steps()
        if self._pipeline is not None and self._pipeline.deployed:
            self._pipeline.abandon()
        if self._horizon is not None:
            self._horizon.release()

    # ----- evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", args)

    @override
    def on_validation_start(self) -> None:
        self._settle()

    def _evaluation_step(self, hook: str, args: tuple[Any, ...]) -> Any:
        assert self._pipeline is not None and self._pipelined is not None
        handle = self._take_in_hand(args)
        lead = len(self._pipeline.workers) + 2
        limit = self._batches_in_evaluation(hook, handle, args)
        begin_ahead(
            handle, int(min(lead, limit)), lambda batch, ahead: self._begin_evaluation(hook, batch, args, ahead)
        )
        assert handle.step is not None
        if handle.evaluation is None:
            return handle.step.resume(None)  # the step did not call the pipelined module
        return handle.step.resume(self._pipelined.evaluated(handle.evaluation, training=False))

    def _begin_evaluation(self, hook: str, handle: Handle, args: tuple[Any, ...], ahead: int) -> bool:
        assert self._pipelined is not None
        self._open(handle, self._dataloader_idx(hook, args))
        if handle.step is None:
            handle.step = self._suspend(hook, self._step_args(hook, handle, args, ahead))
            handle.step.start()
        call = handle.step.call
        if call is not None:
            if ahead and not self._pipelined.accepts(call):
                return False
            handle.evaluation = self._pipelined.evaluate(call)
        return True

    def _dataloader_idx(self, hook: str, args: tuple[Any, ...]) -> int:
        takes_index = is_param_in_hook_signature(getattr(self.lightning_module, hook), "batch_idx", min_args=2)
        rest = args[2:] if takes_index else args[1:]
        return int(rest[0]) if rest else 0

    def _batches_in_evaluation(self, hook: str, handle: Handle, args: tuple[Any, ...]) -> float:
        """Batches after the one in hand that Lightning will take from the same dataloader."""
        trainer = self._trainer
        if handle.feed is None:
            return 0
        if trainer.sanity_checking:
            limits = trainer.num_sanity_val_batches
        elif hook == "validation_step":
            limits = trainer.num_val_batches
        elif hook == "test_step":
            limits = trainer.num_test_batches
        else:
            limits = trainer.num_predict_batches
        return max(0, limits[self._dataloader_idx(hook, args)] - handle.feed.taken)

    # ----- state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Gathers optimizer states too: Lightning asks for those only after the module's state.
        self._gather()
        return super().lightning_module_state_dict()

    @property
    def partition(self) -> list[list[str]]:
        """Names of the layers of every stage, the central node's first; empty before the first batch."""
        return self._pipelined.partition if self._pipelined is not None else []

    @property
    def foresight(self) -> Foresight | None:
        """What is known of devices and links; None outside fit and with ``latency="flops"``."""
        return self._pipelined.foresight if self._pipelined is not None else None

    @property
    def plan(self) -> Plan | None:
        """The planner's last answer that was put in place; None before the first batch, and where nothing is measured.

        Seconds and bytes are those of one batch.
        """
        foresight = self.foresight
        return foresight.forecast.plan if foresight is not None and foresight.forecast is not None else None

    @property
    def schedule(self) -> Schedule:
        """Batches in flight, windows and micro-batches in force; known from ``setup`` on."""
        if self._pipelined is not None:
            return self._pipelined.schedule
        assert self._schedule is not None
        return self._schedule

    def remeasure(self, stages: Sequence[int]) -> None:
        """Measure the devices of these stages again, as soon as the pipeline is drained for it.

        Args:
            stages: Numbers of stages, 0 for the central node's.
        """
        pipelined, foresight = self._pipelined, self.foresight
        if pipelined is None or foresight is None:
            raise PipelineError("devices can be measured in fit only, and not with latency='flops'")
        pipelined.when_drained(lambda: foresight.remeasure(stages))

    def repartition(self, forecast: Forecast, done: Callable[[MoveReport], None] = lambda report: None) -> None:
        """Go over to another partition and schedule, as soon as the pipeline is drained for it.

        Args:
            forecast: What :meth:`Foresight.plan` returned.
            done: Called with what was moved.
        """
        pipelined = self._pipelined
        if pipelined is None or self.foresight is None:
            raise PipelineError("layers can be moved in fit only, and not with latency='flops'")
        pipelined.when_drained(lambda: done(pipelined.move(forecast)))

    @property
    def bits(self) -> dict[str, int]:
        """Bit widths in force for new batches, ``forward`` and ``backward``; empty where the codecs' own hold."""
        return self._pipeline.bits if self._pipeline is not None else {}

    @property
    def bit_widths(self) -> dict[str, int]:
        """Bits per value of ``forward`` and ``backward`` for new batches; a codec without a bit width is left out."""
        own = {direction: self._codecs[f"{direction}_codec"].bits for direction in ("forward", "backward")}
        return {direction: bits for direction, bits in {**own, **self.bits}.items() if bits is not None}

    @property
    def stage_names(self) -> list[str]:
        """Where each stage is: ``central node``, then the workers' URLs; empty outside fit, validate, test, predict."""
        return [] if self._pipeline is None else ["central node", *(worker.name for worker in self._pipeline.workers)]

    @property
    def reports(self) -> dict[int, StageReport]:
        """What each stage last told about itself with a gradient, by its number."""
        return {} if self._pipeline is None else dict(self._pipeline.reports)

    def set_bits(self, forward: int | None = None, backward: int | None = None) -> None:
        """Change bit widths from the next batch on, on every link at the same batch.

        Activations of a batch travel with the width in force when it was begun, its gradients with the one in force
        when its loss was differentiated. Codecs without a bit width ignore it.

        Args:
            forward: Bits per activation.
            backward: Bits per gradient.

        Raises:
            ValueError: If a codec does not take this width. Nothing is changed then.
        """
        if self._pipeline is None:
            raise PipelineError("bit widths can be set in fit only")
        wanted = {"forward": forward, "backward": backward}
        widths = {direction: bits for direction, bits in wanted.items() if bits is not None}
        for direction, bits in widths.items():
            codec = self._codecs[f"{direction}_codec"].fresh()
            if codec.bits is not None:
                try:
                    codec.bits = bits
                except ValueError as error:
                    raise ValueError(f"{direction}_codec={codec.name!r}: {error}") from error
        self._pipeline.bits.update(widths)

    def stats(self) -> list[dict[str, Any]]:
        """Figures of every stage, the central node's first; empty outside fit, validate, test and predict."""
        return self._pipeline.stats() if self._pipeline is not None and self._pipeline.deployed else []

    def make_event_feed(self) -> EventFeed:
        """What stages and links do from now on, on this device's clock; in fit only."""
        if self._pipeline is None:
            raise PipelineError("there are no stages to watch outside fit")
        return EventFeed(self._pipeline)

    def _gather(self) -> None:
        if self._pipelined is None or self._pipeline is None:
            return
        if self._pipeline.failed:
            log.warning("the pipeline has failed; the weights of remote stages are those last gathered")
            return
        self._pipelined.gather()

    def _settle(self) -> None:
        if self._pipeline is not None:
            self._pipeline.settle()

    # ----- helpers

    def _note_batch(self) -> None:
        """Tell foresight what came back since the last step began."""
        assert self._pipeline is not None and self._clock is not None
        rest = self._clock.lap()
        if self.foresight is not None and rest is not None:
            self.foresight.note(self._pipeline.reports, rest)

    @property
    def _synchronous(self) -> bool:
        return self.schedule.synchronous

    def _index(self, optimizer: Optimizer) -> int:
        return next(index for index, known in enumerate(self.optimizers) if known is optimizer)

    def _make_workers(self) -> list[WorkerHandle]:
        places = self._worker_places
        token = self._token or os.environ.get("LIGHTNING_ACCEPT_TOKEN", "")
        if isinstance(places, int):
            self._local = LocalWorkers(
                places, threads=self._worker_threads, allow_optimizer=foreign_classes(self.optimizers)
            )
            self._local.start()
            self._share_cores(self._local.threads)
            places, token = self._local.urls, self._local.token
        return [
            HttpWorker(place, token, timeout=self._timeout, cafile=self._cafile) if isinstance(place, str) else place
            for place in places
        ]

    def _make_schedule(self) -> Schedule:
        workers = self._worker_places if isinstance(self._worker_places, int) else len(self._worker_places)
        in_flight: int | None = None if self._in_flight == "auto" else int(self._in_flight)
        assert self.lightning_module is not None
        if in_flight is None and not self.lightning_module.automatic_optimization:
            log.info("manual optimization: one batch in flight")
            in_flight = 1
        return default_schedule(workers, in_flight, _number(self._micro_batches) or 1)

    def _share_cores(self, threads: int) -> None:
        """While workers run on this machine, leave them the cores that they count on."""
        before = torch.get_num_threads()
        if before > threads:
            torch.set_num_threads(threads)
            self._stand_ins.undo_with(lambda: torch.set_num_threads(before))

    def _abandon_steps(self) -> None:
        feeds, self._feeds = self._feeds, {}
        steps = [step for feed in feeds.values() for step in feed.started()]
        # An error or an interrupt may have come while the step in hand was waiting for its output.
        handle, self._at_work = self._at_work, None
        if handle is not None and handle.step is not None:
            steps.append(handle.step)
        for step in steps:
            step.abandon()

    def _refuse_uncalled(self, hook: str) -> None:
        assert self._pipelined is not None
        raise PipelineError(
            f"{hook} did not call the pipelined module {self._pipelined.name}; name the one that it calls with"
            " AccEPTStrategy(module=...)"
        )

    def _close_pipeline(self) -> None:
        self._abandon_steps()
        self._stand_ins.give_back()
        if self._pipelined is not None:
            self._pipelined.uninstall()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._local is not None:
            self._local.stop()
        self._pipelined = self._pipeline = self._local = self._clock = None
        self._horizon = None


def _default_latency(workers: int | Sequence[str | WorkerHandle]) -> str:
    """Workers started here are all alike, so that equal work is the best guess, and it is the same in every run."""
    real = not isinstance(workers, int) and all(isinstance(worker, str) for worker in workers)
    return "measured" if real else "flops"


def _number(value: int | str) -> int | None:
    """A number, or None for ``auto``."""
    return None if isinstance(value, str) else value


def _chosen(in_flight: int | str, schedule: Schedule) -> int | None:
    """The depth that is not to be chosen any more."""
    return 1 if schedule.synchronous else _number(in_flight)


def _holder() -> str:
    """Who trains, told to others that ask for the same worker."""
    return f"{getpass.getuser()}@{socket.gethostname()} (process {os.getpid()})"


AccEPTStrategy.register_strategies(StrategyRegistry)
