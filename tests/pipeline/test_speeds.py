"""What is known of links, before and while training."""

from __future__ import annotations

import math

from lightning_accept.partition.link import Link, Speed
from lightning_accept.pipeline.speeds import Speeds


def make() -> Speeds:
    return Speeds({(0, 1): Speed(1e6, 0.01), (1, 0): Speed(2e6, 0.02), (1, 2): Speed(4e6), (2, 1): Speed(5e5)})


def test_every_direction_has_its_own_value() -> None:
    assert make().link(0, 1) == Link(1e6, 2e6, 0.01, 0.02)
    assert make().link(1, 0) == Link(2e6, 1e6, 0.02, 0.01)
    assert make().link(0, 2) == Link()


def test_a_device_s_way_is_as_fast_as_its_fastest_link() -> None:
    speeds = make()
    assert (speeds.uplink(1), speeds.downlink(1)) == (4e6, 1e6)
    assert (speeds.uplink(3), speeds.downlink(3)) == (math.inf, math.inf)


def test_first_transfers_of_a_deployment_stand_for_what_was_measured() -> None:
    speeds = make()
    speeds.meet(0, 1, 5e5)
    assert speeds.known[0, 1] == Speed(1e6, 0.01)
    speeds.meet(0, 1, 2.5e5)
    assert speeds.known[0, 1] == Speed(5e5, 0.01)
    speeds.restart()
    speeds.meet(0, 1, 4e5)
    assert speeds.known[0, 1] == Speed(5e5, 0.01)


def test_transfers_faster_than_measured_raise_the_value() -> None:
    speeds = make()
    speeds.meet(0, 1, 3e6)
    assert speeds.known[0, 1] == Speed(3e6, 0.01)


def test_a_link_never_measured_is_learnt_from_its_transfers() -> None:
    speeds = Speeds()
    speeds.meet(1, 2, 7e5)
    assert speeds.link(1, 2) == Link(7e5, math.inf)
