"""DeviceTimes: asks all devices how long parts of a model take them, and remembers the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_accept.graph import Chain, Trace
from lightning_accept.latency.base import LatencyModel
from lightning_accept.latency.measured import Measured
from lightning_accept.latency.profile import Profile, ProfileRequest
from lightning_accept.latency.request import MAX_SECONDS
from lightning_accept.latency.submodels import Span
from lightning_accept.partition.handling import Handling
from lightning_accept.pipeline.central import CentralPipeline
from lightning_accept.pipeline.survey import CENTRAL, Profiler, profile_devices
from lightning_accept.progress import SILENT, Activity, ProgressLine

log = logging.getLogger("lightning_accept")

_CHECK_RUNS = 3
"""Runs of the slowest stage in a check, the warm-up counted."""


@dataclass
class JobSize:
    """What is known of jobs of one size.

    Attributes:
        micro_batches: Jobs per batch.
        batch: Samples per job.
        latency: Times of sub-models on all devices.
        handling: What the codecs add, by device number.
        request: What is measured, without the sub-models.
    """

    micro_batches: int
    batch: int
    latency: LatencyModel
    handling: dict[int, Handling] = field(default_factory=dict)
    request: ProfileRequest | None = None


class DeviceTimes:
    """Times of all sub-models on all devices, for jobs of every size that is thought of.

    Devices are numbered as the planner does: 0 is the central node, worker i of all that were given has number i + 1.

    Args:
        make_latency: Makes a latency model.
        facts: What every device tells of itself (``threads``, ``cores``, ``memory_free``), the central node's first.
        profiler: Measures in this process.
        crowded: Whether all devices are processes on this machine, which leave no core to spare for the codecs.
        seconds: About how long the measuring of one sub-model takes.
        progress: Shows what is being measured.
    """

    def __init__(
        self,
        make_latency: Callable[[], LatencyModel],
        facts: Sequence[Mapping[str, Any]],
        profiler: Profiler,
        *,
        crowded: bool = False,
        seconds: float = 1.0,
        progress: ProgressLine = SILENT,
    ) -> None:
        self.sizes: list[JobSize] = []
        """Jobs of whole batches first."""
        self._make_latency = make_latency
        self._facts = facts
        self._crowded = crowded
        self._profile_seconds = seconds
        self._profiler = profiler
        self._progress = progress

    def prepare(
        self, trace: Trace, chain: Chain, pipeline: CentralPipeline, autocast: str | None, micro_batches: Sequence[int]
    ) -> None:
        """Start with a model, forgetting what was known.

        Args:
            trace: The traced model.
            chain: Its layers.
            pipeline: Whose workers are asked, and whose codecs they try.
            autocast: Name of the autocast dtype, or None.
            micro_batches: Numbers of jobs per batch that are thought of.
        """
        self._trace, self._chain, self._pipeline, self._autocast = trace, chain, pipeline, autocast
        layers = chain.layers
        self.sizes = []
        for count in micro_batches:
            # The predictor knows the sizes that it was trained for; other sizes are measured.
            latency = self._make_latency() if not self.sizes else Measured()
            latency.prepare(len(layers), [layer.flops / count for layer in layers], [layer.name for layer in layers])
            self.sizes.append(JobSize(count, -(-chain.batch // count), latency))

    def measure(self, devices: Sequence[int]) -> None:
        """Measure these devices (again). Nothing may be in flight."""
        with self._progress.show("profiling", len(devices) * len(self.sizes)) as shown:
            for size in self.sizes:
                profiles = self._ask({number: self._request(number, size) for number in devices}, shown)
                for number in sorted(profiles):
                    size.latency.learn(self.name(number), profiles[number].measured)
                    size.handling[number] = self._handling(number, profiles[number])

    def check(self, size: JobSize, stages: Mapping[int, Span]) -> None:
        """Measure stages at the same time; ``stages`` says which device is to have which layers."""
        expected = {number: self.seconds(size, number, span) for number, span in stages.items()}
        # Long enough for the slowest, so that the others are at work meanwhile.
        seconds = min(MAX_SECONDS, max(self._profile_seconds, _CHECK_RUNS * max(expected.values())))
        requests = {
            number: replace(self._request(number, size), spans=(span,), codec_cuts=(), seconds=seconds)
            for number, span in stages.items()
        }
        with self._progress.show("checking the plan", len(stages)) as shown:
            profiles = self._ask(requests, shown)
        told = []
        for number in sorted(profiles):
            (measured,) = profiles[number].measured
            size.latency.check(self.name(number), measured)
            told.append(
                f"{self.name(number)} takes {measured.seconds:.3g} s for layers {measured.first} to"
                f" {measured.stop - 1}, expected were {expected[number]:.3g} s"
            )
        log.info("checked the plan: %s", "; ".join(told))

    def seconds(self, size: JobSize, number: int, span: Span) -> float:
        """Predicted seconds per job (forward and backward) of a sub-model on a device."""
        times = size.latency.times(self.name(number))
        return times.forward(*span) + times.backward(*span)

    def of_whole_batch(self, number: int) -> float:
        """Predicted seconds per batch of a device that has all layers."""
        size = self.sizes[0]
        return size.micro_batches * self.seconds(size, number, (0, len(self._chain.layers)))

    def name(self, number: int) -> str:
        """What a device is called."""
        return CENTRAL if number == 0 else self._pipeline.claimed[number - 1].name

    def memory(self, number: int) -> float | None:
        """Bytes that are free on a device; None if it does not tell."""
        free = self._facts[number].get("memory_free")
        return None if free is None else float(free)

    def _ask(self, requests: Mapping[int, ProfileRequest], shown: Activity) -> dict[int, Profile]:
        """Ask devices at the same time; what is shown names those that are still at it."""
        busy = [self.name(number) for number in requests]

        def done(number: int) -> None:
            busy.remove(self.name(number))
            shown.advance(title=_profiling(list(busy)))

        shown.begin(_profiling(busy))
        return profile_devices(requests, self._pipeline.claimed, self._pipeline.device, self._profiler, done)

    def _request(self, number: int, size: JobSize) -> ProfileRequest:
        if size.request is None:
            settings = self._pipeline.settings
            size.request = ProfileRequest.of(
                self._chain,
                self._trace,
                (),
                batch=size.batch,
                autocast=self._autocast,
                forward_codec=settings.forward_codec,
                backward_codec=settings.backward_codec,
                codec_cuts=range(1, len(self._chain.layers) + 1),
                seconds=self._profile_seconds,
            )
        spans = tuple(size.latency.spans(self.name(number), number == 0))
        return replace(size.request, spans=spans, memory=self.memory(number))

    def _handling(self, number: int, profile: Profile) -> Handling:
        """What messages and their codecs add to a device's stage: nothing where a core is left for them."""
        if not profile.encode:
            return Handling.none(len(self._chain.layers) + 1)
        facts = self._facts[number]
        threads, cores = facts.get("threads") or 1, facts.get("cores")
        share = 1.0 if self._crowded or cores is None else min(1.0, max(0.0, threads + 1 - cores))
        encode, decode = [(0.0, 0.0), *profile.encode], [(0.0, 0.0), *profile.decode]
        if not self._pipeline.settings.compresses_output(self._chain):
            encode[-1] = decode[-1] = (0.0, 0.0)
        message = profile.message
        return Handling(
            [share * (message + forward) for forward, _ in encode],
            [share * (message + forward) for forward, _ in decode],
            [share * (message + backward) for _, backward in encode],
            [share * (message + backward) for _, backward in decode],
        )


def _profiling(devices: Sequence[str]) -> str:
    more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
    return f"profiling {devices[0]}{more}" if devices else "profiling"
