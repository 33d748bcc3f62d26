"""PipelineMonitor: what stages and links do, to any logger, as a picture, and as a trace."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_accept.callbacks.feedback import PredictorFeedback
from lightning_accept.callbacks.metrics import current_step, log_metrics
from lightning_accept.callbacks.needs import accept_strategy, check_interval
from lightning_accept.callbacks.pipeline_metrics import PipelineMetrics
from lightning_accept.callbacks.timeline_picture import draw, pixels
from lightning_accept.callbacks.trace_file import TraceFile
from lightning_accept.pipeline.event_feed import EventFeed
from lightning_accept.pipeline.events import Event
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.pipeline.timeline import Timeline
from lightning_accept.strategy import AccEPTStrategy

log = logging.getLogger("lightning_accept")

_CLOCK_READINGS = 3


@dataclass(frozen=True)
class _Look:
    step: int | None
    period: float | None
    stats: list[dict[str, Any]]
    events: list[Event]


class PipelineMonitor(Callback):
    """Shows what every stage and every link does.

    Every ``every_n_batches`` batches, all loggers of the trainer get, as ``accept/...``:

    - ``period_seconds``: seconds per batch; ``in_flight``: batches in flight; ``bits_forward`` and ``bits_backward``.
    - ``stage_1/...``: ``forward_seconds``, ``backward_seconds``, ``step_seconds`` and ``waiting_seconds`` per job,
      ``busy`` (share of the time with work), ``queued`` jobs, ``outstanding`` forwards, ``staleness`` (updates between
      the last job's forward and its update), ``memory_bytes`` of the process, ``layers``; where devices are measured,
      also ``predicted_seconds`` and ``measured_seconds``, forward and backward together.
    - ``link_0_1/...``: ``activation_bytes`` and ``activation_raw_bytes`` (what they are without a codec) per job,
      ``activation_encode_seconds``, ``activation_bits_per_second``, ``activation_quantisation_error`` (squared error
      over squared values); the same for ``gradient_...``.

    TensorBoard also gets the partition as text, and at the end of every epoch a picture of the timeline of the last
    batches, for which matplotlib must be installed (the extra ``monitor``).

    Workers are asked over the network, by a thread that training does not wait for, so what a logger gets is of a
    moment shortly before; before validation and at the end of an epoch it is waited for.

    Args:
        every_n_batches: Batches between two looks; by default the trainer's ``log_every_n_steps``.
        timeline_batches: Batches in the picture.
        trace: File that gets all events in the Trace Event Format, on one clock; open it in Perfetto or
            chrome://tracing.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(
        self,
        every_n_batches: int | None = None,
        timeline_batches: int = 8,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if timeline_batches < 1:
            raise ValueError(f"timeline_batches={timeline_batches}: give a number from 1")
        self.every_n_batches = None if every_n_batches is None else check_interval(every_n_batches)
        self.timeline_batches = timeline_batches
        self.trace = trace
        self._strategy: AccEPTStrategy | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[_Look | None] | None = None
        self._trace_file: TraceFile | None = None
        self._feed: EventFeed | None = None

    # ----- the hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._strategy = strategy = accept_strategy(trainer, "PipelineMonitor")
        if strategy is None:
            return
        if self.trace is not None:
            self._trace_file = TraceFile(self.trace, time.perf_counter())
        self._feed = strategy.make_event_feed()
        for _ in range(_CLOCK_READINGS):  # nothing else is under way yet
            self._feed.read_clocks()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pipeline monitor")
        self._metrics = PipelineMetrics()
        self._timeline = Timeline(self.timeline_batches)
        self._batches = 0
        self._rebase = True  # neither the deployment nor validation is a part of what is measured
        self._last_look: tuple[int, float] | None = None
        self._partition: list[list[str]] = []
        if _tensorboard(trainer) and not _can_draw():
            log.info("PipelineMonitor draws no timeline: install matplotlib (pip install 'lightning-accept[monitor]')")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._strategy is None:
            return
        self._batches += 1
        if self._pending is not None and self._pending.done():
            self._finish(trainer)
        if self._pending is not None:
            return
        if self._rebase:
            self._begin(trainer, baseline=True)
        elif self._batches % self._every(trainer) == 0:
            self._begin(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy is not None:
            self._look_now(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rebase = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy is None:
            return
        self._look_now(trainer)
        self._log_picture(trainer)
        self._rebase = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy is not None:
            self._look_now(trainer)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    # ----- looking

    def _every(self, trainer: Trainer) -> int:
        return self.every_n_batches or trainer.log_every_n_steps or 50  # type: ignore[attr-defined]

    def _look_now(self, trainer: Trainer) -> None:
        """Look once more, and wait for it."""
        if self._pending is not None:
            self._finish(trainer)
        self._begin(trainer, baseline=self._rebase)
        self._finish(trainer)

    def _begin(self, trainer: Trainer, baseline: bool = False) -> None:
        """Look in the other thread; a baseline is what the next look is compared with, and not logged itself."""
        assert self._pool is not None and self._strategy is not None and self._feed is not None
        now, period = time.perf_counter(), None
        if not baseline and self._last_look is not None and self._batches > self._last_look[0]:
            period = (now - self._last_look[1]) / (self._batches - self._last_look[0])
        self._last_look, self._rebase = (self._batches, now), False
        step = None if baseline else current_step(trainer)
        self._pending = self._pool.submit(_look, self._strategy, self._feed, step, period)

    def _finish(self, trainer: Trainer) -> None:
        """Hand on what the look in progress has found, as soon as that is there."""
        assert self._pending is not None and self._strategy is not None
        look, self._pending = self._pending.result(), None
        if look is None:
            return
        if self._trace_file is not None:
            self._trace_file.name_stages(_titles(self._strategy))
            self._trace_file.add(look.events)
        self._timeline.add(look.events)
        metrics = {**self._metrics.update(look.stats), **self._run_metrics(trainer, self._strategy)}
        if look.step is None:
            return
        if look.period is not None:
            metrics["accept/period_seconds"] = look.period
        log_metrics(trainer, metrics, look.step)
        self._log_partition(trainer, look.step)

    def _run_metrics(self, trainer: Trainer, strategy: AccEPTStrategy) -> dict[str, float]:
        metrics = {f"accept/bits_{direction}": float(bits) for direction, bits in strategy.bit_widths.items()}
        metrics["accept/in_flight"] = float(strategy.schedule.in_flight)
        foresight = strategy.foresight
        told = any(isinstance(callback, PredictorFeedback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if foresight is not None and foresight.forecast is not None and not told:
            for stage, report in strategy.reports.items():
                metrics[f"accept/stage_{stage}/predicted_seconds"] = foresight.expected(stage)
                metrics[f"accept/stage_{stage}/measured_seconds"] = report.forward + report.backward
        return metrics

    # ----- TensorBoard

    def _log_partition(self, trainer: Trainer, step: int) -> None:
        assert self._strategy is not None
        partition = self._strategy.partition
        if partition == self._partition:
            return
        self._partition = partition
        rows = [
            f"| {stage} | {name} | {len(layers)} | {', '.join(layers)} |"
            for stage, (name, layers) in enumerate(zip(self._strategy.stage_names, partition, strict=True))
        ]
        text = "\n".join(["| stage | device | layers | |", "| --- | --- | --- | --- |", *rows])
        for logger in _tensorboard(trainer):
            logger.experiment.add_text("accept/partition", text, step)

    def _log_picture(self, trainer: Trainer) -> None:
        assert self._strategy is not None
        loggers = _tensorboard(trainer)
        if not loggers or not _can_draw() or not self._timeline.stages():
            return
        title = f"epoch {trainer.current_epoch}, the last {self.timeline_batches} batches"
        image = pixels(draw(self._timeline, _titles(self._strategy), title))
        for logger in loggers:
            logger.experiment.add_image("accept/timeline", image, current_step(trainer), dataformats="HWC")

    def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        if self._trace_file is not None:
            self._trace_file.close()
        self._strategy = self._pending = self._trace_file = self._feed = None


def _look(strategy: AccEPTStrategy, feed: EventFeed, step: int | None, period: float | None) -> _Look | None:
    try:
        return _Look(step, period, strategy.stats(), feed.poll())
    except PipelineError as error:
        # If a worker is lost, training itself says so.
        log.debug("PipelineMonitor could not look: %s", error)
        return None


def _titles(strategy: AccEPTStrategy) -> list[str]:
    return [f"{stage}: {name}" for stage, name in enumerate(strategy.stage_names)]


def _tensorboard(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True
