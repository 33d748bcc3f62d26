"""Foresight: what is known of devices and links, and the plans that follow from it."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_accept.graph import Chain, Trace
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.partition.forecast import Forecast, least_period, make_forecast, renew_forecast
from lightning_accept.partition.link import Speed
from lightning_accept.partition.model import PipelineModel
from lightning_accept.partition.plan import Plan, PlanError
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.schedule import default_schedule
from lightning_accept.partition.simulator import simulate_period
from lightning_accept.partition.times import SubModelTimes, TableTimes
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.crossing import crossing
from lightning_accept.pipeline.device_times import DeviceTimes, JobSize
from lightning_accept.pipeline.messages import StageReport
from lightning_accept.pipeline.optimizers import state_copies
from lightning_accept.pipeline.speeds import Speeds
from lightning_accept.pipeline.survey import measure_links
from lightning_accept.pipeline.watch import Change, StageMedian, StageWatch
from lightning_accept.progress import SILENT, ProgressLine

log = logging.getLogger("lightning_accept")

MICRO_BATCHES = (1, 2, 4, 8)
"""Numbers of micro-batches that ``auto`` chooses among."""

_RESTS_KEPT = 32
_CHECKS = 3
"""Plans whose stages are measured before one is put in place, at most."""


@dataclass(frozen=True)
class Wishes:
    """What the user has decided.

    Attributes:
        in_flight: Batches in flight; None to choose.
        micro_batches: Micro-batches; None to choose.
        may_leave_out: Whether workers may be left out that would slow the chain.
        check_plan: Whether a plan's stages are measured before it is put in place.
    """

    in_flight: int | None = None
    micro_batches: int | None = 1
    may_leave_out: bool = False
    check_plan: bool = True


class Foresight:
    """Plans the partition and the schedule from measurements, and keeps them up to date.

    Devices are numbered as the planner does: 0 is the central node, worker i of all that were given has number i + 1.

    Args:
        times: Asks the devices.
        wishes: What is not to be chosen.
        link_seconds: About how long the measuring of one direction of a link takes.
        progress: Shows what is being measured.
    """

    def __init__(
        self,
        times: DeviceTimes,
        wishes: Wishes,
        *,
        link_seconds: float = 2.0,
        progress: ProgressLine = SILENT,
    ) -> None:
        self.forecast: Forecast | None = None
        """The plan in force."""
        self.speeds = Speeds()
        """How fast the links are."""
        self.loss_seconds = 0.0
        """Seconds per batch that the central node spends on all but stage 0: the loss, data, Lightning's loop."""
        self.stale = False
        """Whether something has changed since the plan in force was made."""
        self._wishes = wishes
        self._starts: tuple[int, ...] | None = None
        self._link_seconds = link_seconds
        self._progress = progress
        self._times = times
        self._watch = StageWatch()
        self._rests: deque[float] = deque(maxlen=_RESTS_KEPT)
        self._steps: dict[int, float] = {}
        self._latest: dict[int, StageReport] = {}
        self._planned_speeds: dict[tuple[int, int], Speed] = {}
        self._deploy_seconds = 1.0

    # ----- asking the devices

    def survey(
        self,
        trace: Trace,
        chain: Chain,
        pipeline: CentralPipeline,
        optimizers: Sequence[Optimizer],
        autocast: str | None,
    ) -> None:
        """Measure all devices and links for this model. Nothing may be in flight."""
        self._chain, self._pipeline, self._optimizers = chain, pipeline, optimizers
        self._times.prepare(trace, chain, pipeline, autocast, self._numbers_of_micro_batches())
        started = time.perf_counter()
        self.measure(range(len(pipeline.claimed) + 1))
        self.speeds = measure_links(
            pipeline.claimed, self._link_seconds, all_pairs=self._wishes.may_leave_out, progress=self._progress
        )
        log.info(
            "measured %d devices and %d ways between them in %.3g s: %s",
            len(pipeline.claimed) + 1,
            len(self.speeds.known),
            time.perf_counter() - started,
            self.describe(),
        )

    def fix_partition(self, starts: Sequence[int]) -> None:
        """Leave the partition as the user wants it: the first layer of every worker's stage."""
        self._starts = tuple(starts)

    def measure(self, devices: Sequence[int]) -> None:
        """Measure these devices (again). Nothing may be in flight."""
        self._times.measure(devices)

    def describe(self) -> str:
        """Every device's time for a whole batch and every link's bandwidth, in one line."""
        devices = range(len(self._pipeline.claimed) + 1)
        whole = [f"{self.name(number)} {self._times.of_whole_batch(number):.3g} s per batch" for number in devices]
        links = [
            f"{self.name(source)} -> {self.name(target)} {1e-6 * speed.bandwidth:.3g} Mbit/s"
            for (source, target), speed in self.speeds.known.items()
            if math.isfinite(speed.bandwidth)
        ]
        return "; ".join([*whole, *links])

    @property
    def layers(self) -> list[str]:
        """Names of the model's layers."""
        return [layer.name for layer in self._chain.layers]

    def name(self, device: int) -> str:
        """What a device is called."""
        return self._times.name(device)

    # ----- planning

    def plan(self) -> Forecast:
        """The best partition and schedule by what is known now.

        Raises:
            PlanError: If there is none.
        """
        problems = {size.micro_batches: self._problem(size) for size in self._times.sizes}
        return make_forecast(problems, in_flight=self._wishes.in_flight, starts=self._starts)

    def checked_plan(self) -> Forecast:
        """As :meth:`plan`, but every stage of the plan has been measured as it is. Nothing may be in flight.

        The stages are measured on all devices at the same time, as they will compute in training. Where another plan is
        the best one by what this has told, its stages are measured too, for a few rounds; the best of all plans that
        were measured is taken then.

        Raises:
            PlanError: If there is none.
        """
        if not self._wishes.check_plan:
            return self.plan()
        seen: set[tuple[int, int, Span]] = set()
        tried: list[Forecast] = []
        for _ in range(_CHECKS):
            forecast = self.plan()
            tried.append(forecast)
            stages = {load.device: (load.first, load.stop) for load in forecast.plan.stages}
            keys = {(forecast.schedule.micro_batches, *stage) for stage in stages.items()}
            if keys <= seen:
                break
            seen |= keys
            self._times.check(self._size_of(forecast), stages)
        known = []
        for forecast in tried:
            problem = self._problem(self._size_of(forecast))
            with suppress(PlanError):  # a stage that was to fit did not
                known.append(renew_forecast(problem, forecast, in_flight=self._wishes.in_flight))
        return min(known, key=lambda forecast: forecast.period) if known else self.plan()

    def least_period(self) -> float:
        """Seconds per batch that no partition and no schedule can beat; much sooner told than :meth:`plan`.

        Raises:
            PlanError: If there is no partition.
        """
        return min(least_period(self._problem(size), size.micro_batches, self._starts) for size in self._times.sizes)

    def period(self, forecast: Forecast) -> float:
        """Seconds per batch that an earlier forecast is worth by what is known now."""
        size, plan = self._size_of(forecast), forecast.plan
        model = PipelineModel.of(self._problem(size), plan.devices, plan.boundaries, size.micro_batches)
        return simulate_period(model, forecast.schedule)

    def moving_seconds(self, new: Forecast) -> float:
        """Estimated seconds that the pipeline stands still when it goes over to another forecast."""
        old = self.forecast
        if old is None:
            return 0.0
        owners = [_owners(forecast.plan) for forecast in (old, new)]
        copies = 1 + state_copies(self._optimizers)
        seconds = 0.0
        for layer, before, after in zip(self._chain.layers, *owners, strict=True):
            if before != after:
                way = [(before, after)] if (before, after) in self.speeds.known else [(before, 0), (0, after)]
                for hop in way:
                    speed = self.speeds.known.get(hop, Speed())
                    seconds += 8.0 * copies * layer.weight_bytes / speed.bandwidth + 2 * speed.latency
        # The drain: stages fall idle one after the other, and fill again.
        return seconds + self._deploy_seconds + self.period(old) * (len(old.plan.stages) - 1)

    def deployed(self, forecast: Forecast, seconds: float) -> None:
        """A forecast is in force from now on; putting it in place took so many seconds."""
        self.forecast = forecast
        self.stale = False
        self._planned_speeds = dict(self.speeds.known)
        self._deploy_seconds = seconds
        self._watch.restart()
        self.speeds.restart()

    # ----- what training tells

    def note(self, reports: Mapping[int, StageReport], rest: float | None) -> None:
        """Take in what came back with one batch.

        Args:
            reports: What the stages report of one job.
            rest: Seconds of this batch in which the central node neither waited nor computed stage 0; None if unknown.
        """
        self._watch.note(reports)
        if rest is not None:
            self._rests.append(max(0.0, rest))
        self._latest = dict(reports)

    def look(self, threshold: float) -> tuple[dict[int, StageMedian], list[Change]]:
        """Learn from what was noted since the last look; returns medians and stages that are off expectations."""
        medians, changes = self._watch.look(threshold)
        if self.forecast is None or not medians:
            return medians, []
        if self._rests:
            self.loss_seconds = statistics.median(self._rests)
        size = self._size_of(self.forecast)
        off = {change.stage for change in changes}
        for stage, median in medians.items():
            load = self.forecast.plan.stages[stage]
            self._steps[stage] = median.step
            if stage not in off:
                size.latency.observe(
                    self.name(load.device), Measurement(load.first, load.stop, median.forward, median.backward)
                )
        self._learn_speeds()
        self.stale = self.stale or bool(changes) or self._links_differ(threshold)
        return medians, changes

    def expected(self, stage: int) -> float:
        """Predicted seconds per job (forward and backward) of a stage of the plan in force."""
        assert self.forecast is not None
        load = self.forecast.plan.stages[stage]
        return self._times.seconds(self._size_of(self.forecast), load.device, (load.first, load.stop))

    def remeasure(self, stages: Sequence[int]) -> None:
        """Measure the devices of these stages again. Nothing may be in flight."""
        assert self.forecast is not None
        self.measure([self.forecast.plan.stages[stage].device for stage in stages])
        for stage in stages:
            self._watch.restart(stage)
        self.stale = True

    # ----- helpers

    def _size_of(self, forecast: Forecast) -> JobSize:
        """What is known of jobs of the size that a forecast has."""
        return next(size for size in self._times.sizes if size.micro_batches == forecast.schedule.micro_batches)

    def _numbers_of_micro_batches(self) -> list[int]:
        wanted = self._wishes.micro_batches
        if wanted is not None:
            return [wanted]
        if self._chain.batch_dependent:
            log.info("micro_batches: 1, since the model holds BatchNorm, whose statistics are those of a whole batch")
            return [1]
        return [count for count in MICRO_BATCHES if count == 1 or count <= self._chain.batch]

    def _problem(self, size: JobSize) -> Problem:
        """The planner's problem for one job."""
        settings, pipeline = self._pipeline.settings, self._pipeline
        down, up = crossing(
            self._chain,
            settings.forward_codec,
            settings.backward_codec,
            pipeline.bits,
            size.batch,
            settings.output_codecs(self._chain),
        )
        layers = self._chain.layers
        schedule = default_schedule(len(pipeline.claimed), self._wishes.in_flight, size.micro_batches)
        devices = []
        for number in range(len(pipeline.claimed) + 1):
            devices.append(
                Device(
                    self.name(number),
                    self._stage_times(size, number),
                    memory=self._times.memory(number) or math.inf,
                    weight_versions=schedule.staleness[number] + 1,
                    in_flight=schedule.in_flight,
                    handling=size.handling[number],
                    uplink=self.speeds.uplink(number),
                    downlink=self.speeds.downlink(number),
                )
            )
        return Problem(
            devices,
            down,
            up,
            self.speeds.link,
            weight_bytes=[layer.weight_bytes for layer in layers],
            activation_bytes=[layer.activation_bytes for layer in layers],
            state_copies=1 + state_copies(self._optimizers),
            loss_time=self.loss_seconds,
            may_leave_out=self._wishes.may_leave_out,
            share=True,
        )

    def _stage_times(self, size: JobSize, number: int) -> SubModelTimes:
        """A device's times for one job, with its part of the optimizer step."""
        times = size.latency.times(self.name(number))
        rate = self._step_rate(number) / size.micro_batches
        weights = [0]
        for layer in self._chain.layers:
            weights.append(weights[-1] + layer.weight_bytes)
        return TableTimes.from_function(
            times.layers,
            lambda first, stop: (
                times.forward(first, stop),
                times.backward(first, stop) + rate * (weights[stop] - weights[first]),
            ),
        )

    def _step_rate(self, number: int) -> float:
        """Seconds of a device's optimizer step per byte of weights, as its last stage has shown."""
        if self.forecast is None:
            return 0.0
        for stage, load in enumerate(self.forecast.plan.stages):
            nbytes = sum(layer.weight_bytes for layer in self._chain.layers[load.first : load.stop])
            if load.device == number and nbytes and stage in self._steps:
                return self._steps[stage] / nbytes
        return 0.0

    def _learn_speeds(self) -> None:
        """Take in the bandwidths that the last transfers have met."""
        assert self.forecast is not None
        devices = self.forecast.plan.devices
        last = len(devices) - 1
        readings: dict[tuple[int, int], float | None] = {}
        for stage, report in self._latest.items():
            readings[devices[stage], devices[(stage + 1) % (last + 1)]] = report.down
            readings[devices[stage], devices[stage - 1]] = report.up
        received = self._pipeline.received
        for way, source in (("down", devices[last]), ("up", devices[min(1, last)])):
            speed = received.get(way)
            readings[source, 0] = None if speed is None else speed.bandwidth
        for ends, reading in readings.items():
            if reading is not None:
                self.speeds.meet(*ends, reading)

    def _links_differ(self, threshold: float) -> bool:
        for way, planned in self._planned_speeds.items():
            ratio = self.speeds.known[way].bandwidth / planned.bandwidth
            if math.isfinite(ratio) and not 1 / (1 + threshold) <= ratio <= 1 + threshold:
                return True
        return False


def _owners(plan: Plan) -> list[int]:
    """The device of every layer."""
    return [stage.device for stage in plan.stages for _ in range(stage.first, stage.stop)]
