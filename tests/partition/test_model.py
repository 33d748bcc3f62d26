"""The simulator's view of a plan."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_accept.partition.handling import Handling
from lightning_accept.partition.link import Link
from lightning_accept.partition.model import Hop, PipelineModel, StageModel
from lightning_accept.partition.planner import plan_partition
from lightning_accept.partition.problem import Device, Problem
from lightning_accept.partition.times import AdditiveTimes


@pytest.mark.parametrize("seed", range(40))
def test_busiest_part_is_the_plan_s_period(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, devices = 6, int(rng.integers(1, 5))
    links = {
        (source, target): Link(*rng.uniform(8, 80, 2), *rng.uniform(0, 1, 2), bool(rng.random() < 0.5))
        for source in range(devices)
        for target in range(devices)
    }
    problem = Problem(
        [
            Device(
                f"d{index}",
                AdditiveTimes(rng.random(layers), rng.random(layers)),
                handling=Handling(*rng.random((4, layers + 1)).tolist()) if seed % 2 else None,
                uplink=float(rng.uniform(8, 80)) if seed % 3 else float("inf"),
                downlink=float(rng.uniform(8, 80)) if seed % 3 else float("inf"),
            )
            for index in range(devices)
        ],
        rng.integers(0, 9, layers + 1).tolist(),
        rng.integers(0, 9, layers + 1).tolist(),
        lambda source, target: links[source, target],
        loss_time=0.5,
        may_leave_out=bool(rng.random() < 0.5),
    )
    plan = plan_partition(problem)
    model = PipelineModel.of(problem, plan.devices, plan.boundaries)
    assert model.least_period() == pytest.approx(plan.period)


def test_of_a_plan() -> None:
    times = AdditiveTimes([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    devices = [Device(f"d{index}", times) for index in range(3)]
    link = Link(8.0, 16.0, 0.1, 0.2, False)
    problem = Problem(devices, [1, 2, 3, 4], [5, 6, 7, 8], lambda source, target: link, loss_time=0.5)
    model = PipelineModel.of(problem, (0, 1, 2), (0, 1, 2))
    assert model.stages == (StageModel(1.0, 2.0), StageModel(2.0, 4.0), StageModel(3.0, 6.0))
    seconds = ((2, 3), (3, 3.5), (4, 4))
    assert model.hops == tuple(Hop(down, up, 0.1, 0.2, False, 8.0, 16.0) for down, up in seconds)
    assert model.loss == 0.5


def test_micro_batches_multiply_the_least_period() -> None:
    model = PipelineModel((StageModel(0.1, 0.2),) * 3, (Hop(1.0, 0.5),) * 3, 5.0)
    assert model.least_period(1) == pytest.approx(5.3)
    assert model.least_period(8) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("stages", "hops", "loss", "message"),
    [
        (0, 0, 0.0, "at least stage 0"),
        (3, 2, 0.0, "2 workers need 3 hops, not 2"),
        (1, 1, 0.0, "0 workers need 0 hops, not 1"),
        (2, 2, -1.0, "finite and not negative"),
        (2, 2, float("nan"), "finite and not negative"),
    ],
)
def test_refuses(stages: int, hops: int, loss: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineModel((StageModel(1.0, 1.0),) * stages, (Hop(),) * hops, loss)


def test_refuses_a_link_of_two_kinds() -> None:
    with pytest.raises(ValueError, match="the same link"):
        PipelineModel((StageModel(1.0, 1.0),) * 2, (Hop(), Hop(full_duplex=False)))
