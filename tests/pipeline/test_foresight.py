"""Planning from measurements, and learning from what training reports, with devices of known speed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accept.codecs import Raw
from lightning_accept.graph import Chain, Trace, trace
from lightning_accept.latency.measured import Measured
from lightning_accept.latency.profile import Profile, ProfileRequest
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.crossing import crossing
from lightning_accept.pipeline.deploy import Settings
from lightning_accept.pipeline.device_times import DeviceTimes
from lightning_accept.pipeline.foresight import Foresight, Wishes
from lightning_accept.pipeline.messages import StageReport
from lightning_accept.progress import SILENT, ProgressLine

LAYERS = 8
SECONDS = 0.03
"""What a layer takes on a device of speed 1, a third of it forward."""


class Devices:
    """The central node (number 0) and workers, each with a speed that may change."""

    def __init__(self, *speeds: float) -> None:
        self.speeds = list(speeds)
        self.asked: list[int] = []
        self.spans: dict[int, list[Span]] = {}
        self.surprise: Callable[[int, Span], float] = lambda number, span: 1.0
        """By how much several layers take longer on a device than its layers alone, and the whole, would have it."""
        self.codec_seconds = 0.0

    def profile(self, number: int, request: ProfileRequest) -> Profile:
        self.asked.append(number)
        self.spans.setdefault(number, []).extend(request.spans)
        batch = request.cuts[0][0].shape[0]
        each = SECONDS * batch / 16 / self.speeds[number]
        codecs = ((self.codec_seconds, self.codec_seconds),) * len(request.codec_cuts)
        seconds = [each * self.work(number, span) for span in request.spans]
        return Profile(
            tuple(Measurement(*span, s / 3, s * 2 / 3) for span, s in zip(request.spans, seconds, strict=True)),
            codecs,
            codecs,
        )

    def work(self, number: int, span: Span) -> float:
        length = span[1] - span[0]
        return length * (self.surprise(number, span) if 1 < length < LAYERS else 1.0)

    def report(self, foresight: Foresight, number: int, stage: int) -> StageReport:
        assert foresight.forecast is not None
        load = foresight.forecast.plan.stages[stage]
        seconds = (load.stop - load.first) * SECONDS / self.speeds[number]
        return StageReport(seconds / 3, seconds * 2 / 3)


class Worker:
    def __init__(self, devices: Devices, number: int, speed: Speed) -> None:
        self.name = self.address = f"http://pi-{number}"
        self.devices, self.number, self.speed = devices, number, speed

    def profile(self, request: ProfileRequest, timeout: float) -> Profile:
        return self.devices.profile(self.number, request)

    def measure_link(self, seconds: float) -> tuple[Speed, Speed]:
        return self.speed, self.speed

    def measure_link_to(self, address: str, seconds: float) -> Speed:
        return self.speed


@pytest.fixture(scope="module")
def traced() -> tuple[Trace, Chain]:
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS)))
    found = trace(net, (torch.randn(16, 32),), {})
    return found, Chain.from_trace(found)


def make(
    traced: tuple[Trace, Chain],
    devices: Devices,
    speed: Speed | None = None,
    wishes: Wishes | None = None,
    progress: ProgressLine = SILENT,
) -> tuple[Foresight, Any]:
    workers = [Worker(devices, number, speed or Speed()) for number in range(1, len(devices.speeds))]
    settings = Settings(Raw(), Raw(), Raw(), weight_prediction=True, seed=0)
    pipeline: Any = SimpleNamespace(
        claimed=workers, device=torch.device("cpu"), settings=settings, bits={}, received={"up": None, "down": None}
    )
    times = DeviceTimes(
        Measured,
        [{}] * len(devices.speeds),
        lambda request, device: devices.profile(0, request),
        progress=progress,
    )
    foresight = Foresight(times, wishes or Wishes(), progress=progress)
    foresight.survey(*traced, pipeline, [], None)
    return foresight, pipeline


def train(foresight: Foresight, devices: Devices, batches: int = 10, down: float | None = None) -> None:
    """Let all stages of the plan in force report."""
    assert foresight.forecast is not None
    for _ in range(batches):
        reports = {
            stage: devices.report(foresight, load.device, stage)
            for stage, load in enumerate(foresight.forecast.plan.stages)
        }
        if down is not None:
            reports = {n: StageReport(r.forward, r.backward, down=down, up=down) for n, r in reports.items()}
        foresight.note(reports, 0.001)


def test_fast_devices_get_more_layers(traced: tuple[Trace, Chain]) -> None:
    foresight, _ = make(traced, Devices(1.0, 2.0, 1.0))
    forecast = foresight.plan()
    assert [stage.stop - stage.first for stage in forecast.plan.stages] == [2, 4, 2]
    assert forecast.plan.period == pytest.approx(2 * SECONDS)


def test_slow_links_decide_where_to_cut(traced: tuple[Trace, Chain]) -> None:
    _, chain = traced
    down, _ = crossing(chain, Raw(), Raw(), {})
    foresight, _ = make(traced, Devices(1.0, 1.0), Speed(8.0 * down[1] / 0.5))
    forecast = foresight.plan()
    # Both hops of an only worker share its link: the activation and the gradient of the output.
    assert forecast.plan.bottleneck == "network of stage 0 (central node)"
    assert forecast.plan.period == pytest.approx(1.0, rel=0.01)


def test_all_links_of_the_chain_are_measured(traced: tuple[Trace, Chain]) -> None:
    foresight, _ = make(traced, Devices(1.0, 1.0, 1.0, 1.0), Speed(1e6, 0.01))
    assert set(foresight.speeds.known) == {
        (0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (3, 0), (0, 3),
    }  # fmt: skip
    more, _ = make(traced, Devices(1.0, 1.0, 1.0, 1.0), wishes=Wishes(may_leave_out=True))
    assert len(more.speeds.known) == 12


def test_codecs_hold_up_the_stages_beside_a_cut(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0)
    devices.codec_seconds = 0.01
    foresight, _ = make(traced, devices)
    stages = foresight.plan().plan.stages
    # Four codec calls on either device: activation and gradient of the cut, and of the output.
    assert [stage.seconds for stage in stages] == pytest.approx([4 * SECONDS + 0.04] * 2)


def test_a_plan_is_checked_before_it_is_put_in_place(traced: tuple[Trace, Chain], noted: Any) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    devices.surprise = lambda number, span: 2.0 if number == 2 else 1.0
    foresight, _ = make(traced, devices, progress=noted)
    inferred = foresight.plan()
    assert [stage.stop - stage.first for stage in inferred.plan.stages] == [3, 2, 3]
    devices.spans.clear()
    noted.take()
    checked = foresight.checked_plan()
    assert [stage.stop - stage.first for stage in checked.plan.stages][2] < 3
    for stage in checked.plan.stages:
        assert stage.seconds == pytest.approx(SECONDS * devices.work(stage.device, (stage.first, stage.stop)))
        assert (stage.first, stage.stop) in devices.spans[stage.device]
    assert checked.period < foresight.period(inferred)
    assert len(devices.spans[0]) <= 3
    (first, *_) = noted.take()
    assert first[0] == ("checking the plan", 0.0)


def test_the_best_of_the_plans_that_were_measured_is_taken(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices)
    inferred = foresight.plan()
    stages = {(stage.device, (stage.first, stage.stop)) for stage in inferred.plan.stages}
    devices.surprise = lambda number, span: 1.5 if (number, span) in stages else 4.0
    checked = foresight.checked_plan()
    assert checked.starts == inferred.starts
    seconds = [stage.seconds for stage in checked.plan.stages]
    assert seconds == pytest.approx([4.5 * SECONDS, 3 * SECONDS, 4.5 * SECONDS])


def test_a_plan_whose_stage_does_not_fit_is_not_taken(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices)
    devices.surprise = lambda number, span: math.inf if number == 2 else 1.0
    assert [stage.stop - stage.first for stage in foresight.checked_plan().plan.stages][2] == 1


def test_a_plan_that_holds_is_checked_once(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 2.0, 1.0)
    foresight, _ = make(traced, devices)
    devices.spans.clear()
    forecast = foresight.checked_plan()
    stages = {stage.device: [(stage.first, stage.stop)] for stage in forecast.plan.stages}
    assert devices.spans == stages
    assert forecast.starts == foresight.plan().starts


def test_a_plan_may_be_left_unchecked(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 2.0, 1.0)
    foresight, _ = make(traced, devices, wishes=Wishes(check_plan=False))
    devices.spans.clear()
    assert foresight.checked_plan().starts == foresight.plan().starts
    assert not devices.spans


def test_micro_batches_are_measured_at_their_size(traced: tuple[Trace, Chain]) -> None:
    foresight, _ = make(traced, Devices(1.0, 1.0, 1.0), Speed(2e6), Wishes(micro_batches=None))
    forecast = foresight.plan()
    assert {candidate.schedule.micro_batches for candidate in forecast.trade} == {1, 2, 4, 8}
    assert forecast.plan.stages[0].seconds == pytest.approx(
        SECONDS * (forecast.plan.stages[0].stop - forecast.plan.stages[0].first)
    )


def test_batch_norm_keeps_batches_whole(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    found = trace(net, (torch.randn(16, 8),), {})
    with caplog.at_level(logging.INFO, "lightning_accept"):
        foresight, _ = make((found, Chain.from_trace(found)), Devices(1.0, 1.0), wishes=Wishes(micro_batches=None))
    assert "BatchNorm" in caplog.text
    assert foresight.plan().schedule.micro_batches == 1


def test_a_given_partition_stays(traced: tuple[Trace, Chain]) -> None:
    foresight, _ = make(traced, Devices(1.0, 2.0, 1.0))
    foresight.fix_partition([1, 2])
    assert foresight.plan().starts == [1, 2]


def test_training_corrects_the_times(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices)
    foresight.deployed(foresight.plan(), 0.5)
    devices.speeds[1] = 0.5  # slower than measured, right from the start
    for _ in range(6):
        train(foresight, devices)
        medians, changes = foresight.look(0.25)
        assert not changes
    assert medians[1].seconds == pytest.approx(2 * foresight.expected(0) * 3 / 2, rel=0.6)
    assert foresight.expected(1) == pytest.approx(medians[1].seconds, rel=0.1)
    assert foresight.expected(0) == pytest.approx(medians[0].seconds, rel=0.02)
    sizes = [stage.stop - stage.first for stage in foresight.plan().plan.stages]
    assert sizes[1] < sizes[0]


def test_a_changed_device_is_noticed_and_measured_again(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices)
    old = foresight.plan()
    foresight.deployed(old, 0.5)
    train(foresight, devices)
    assert foresight.look(0.25)[1] == []
    assert not foresight.stale
    devices.speeds[2] /= 3
    train(foresight, devices)
    (change,) = foresight.look(0.25)[1]
    assert (change.stage, change.ratio) == (2, pytest.approx(3))
    devices.asked.clear()
    foresight.remeasure([2])
    assert devices.asked == [2]
    assert foresight.stale
    new = foresight.plan()
    assert [stage.stop - stage.first for stage in new.plan.stages] == [3, 4, 1]
    assert new.period < 0.7 * foresight.period(old)
    train(foresight, devices)
    assert foresight.look(0.25)[1] == []  # the new speed is what is expected now


def test_links_follow_the_transfers_of_training(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, pipeline = make(traced, devices, Speed(1e6, 0.002))
    foresight.deployed(foresight.plan(), 0.5)
    train(foresight, devices, down=5e5)  # two messages share the way
    foresight.look(0.25)
    assert foresight.speeds.known[0, 1] == Speed(1e6, 0.002)
    assert not foresight.stale
    train(foresight, devices, down=4e5)
    foresight.look(0.25)
    assert foresight.speeds.known[0, 1] == Speed(8e5, 0.002)
    assert foresight.speeds.known[2, 1] == Speed(8e5, 0.002)
    assert not foresight.stale
    pipeline.received = {"up": Speed(5e5, 0.1), "down": None}
    train(foresight, devices)
    foresight.look(0.25)
    pipeline.received = {"up": Speed(2.5e5, 0.1), "down": None}
    train(foresight, devices)
    foresight.look(0.25)
    assert foresight.speeds.known[1, 0] == Speed(5e5, 0.002)
    assert foresight.stale


def test_moving_costs_what_travels(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices, Speed(1e6))
    old = foresight.plan()
    foresight.deployed(old, 0.5)
    assert foresight.moving_seconds(old) == pytest.approx(0.5 + 2 * foresight.period(old))
    foresight.fix_partition([old.starts[0], old.starts[1] - 1])
    layer = 4 * (32 * 32 + 32)
    assert foresight.moving_seconds(foresight.plan()) - foresight.moving_seconds(old) == pytest.approx(8e-6 * layer)


def test_the_central_node_s_own_time_counts(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices)
    foresight.deployed(foresight.plan(), 0.5)
    train(foresight, devices)
    for _ in range(40):
        foresight.note({}, 0.1)
    foresight.look(0.25)
    assert foresight.loss_seconds == pytest.approx(0.1)
    assert foresight.plan().plan.stages[0].stop == 1


def test_optimizer_steps_count_once_known(traced: tuple[Trace, Chain]) -> None:
    devices = Devices(1.0, 1.0, 1.0)
    foresight, _ = make(traced, devices)
    forecast = foresight.plan()
    foresight.deployed(forecast, 0.5)
    before = foresight.period(forecast)
    for _ in range(5):
        foresight.note({1: StageReport(0.03, 0.06, step=0.05)}, None)
    foresight.look(0.25)
    assert foresight.period(forecast) == pytest.approx(before + 0.05, rel=0.1)


def test_measuring_shows_whom_it_waits_for(traced: tuple[Trace, Chain], noted: Any) -> None:
    foresight, _ = make(traced, Devices(1.0, 1.0, 1.0), wishes=Wishes(micro_batches=None), progress=noted)
    profiling, links = noted.take()
    assert profiling[:2] == [("profiling", 0.0), ("profiling central node and 2 more", 0.0)]
    sizes = 4
    assert [share for _, share in profiling if share < 1][-1] == round(1 - 1 / (3 * sizes), 3)
    assert profiling[-1] == ("profiling", 1.0)
    titles = list(dict.fromkeys(title for title, _ in links))
    one, two = "http://pi-1", "http://pi-2"
    assert titles == [
        "measuring links",
        *(f"measuring link to and from {name}" for name in (one, two)),
        f"measuring link {one} -> {two}",
        f"measuring link {two} -> {one}",
    ]
    assert [share for _, share in links] == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1.0]
    foresight.measure([1])
    assert noted.take() == [
        [
            ("profiling", 0.0),
            *(
                state
                for size in range(sizes)
                for state in ((f"profiling {one}", size / sizes), ("profiling", (size + 1) / sizes))
            ),
        ]
    ]
