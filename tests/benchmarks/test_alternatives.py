from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

import alternatives
import pytest
import tables
from report import Report
from rivals import job, running
from rivals.variants import Variant, variants

OUTPUT = "ready, 9 batches\nbatch 1 10.5\nplan {}\nbatch 2 11.0\naccuracy 2 0.25\nbatch 3 11.5\nbat"
DEVICES = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0
  eth0: 1234567    1000    0    0    0     0          0         0   765432     900    0    0    0     0       0
"""


def command_line(**changes: Any) -> argparse.Namespace:
    values = {
        "shares": [60.0, 40.0, 30.0],
        "micro_batches": [4],
        "powersgd_rank": 2,
        "local_steps": 2,
        "our_method": "ours",
        "predictor": None,
        "in_flight": None,
        "quick": True,
        "size": 32,
        "batches": 3,
        "cap": 60.0,
        "learning_rate": 0.02,
        "sync": 0,
        "scale_lr": False,
        "target": 0.9,
        "epochs": 2,
    }
    return argparse.Namespace(**{**values, **changes})


def test_what_a_process_prints_is_read() -> None:
    assert running.batch_times(OUTPUT) == [10.5, 11.0, 11.5]
    assert running.accuracies(OUTPUT) == [(2, 0.25)]
    assert running.sent_bytes(DEVICES) == 765432


def test_batches_are_divided_by_the_shares() -> None:
    assert job.divide(128, (60, 40, 30)) == [0, 59, 98, 128]
    with pytest.raises(ValueError, match="a part would be empty; use a larger batch"):
        job.divide(4, (98, 1, 1))


def test_every_epoch_shows_every_sample_once_and_all_devices_the_same() -> None:
    one, other = (list(job.shuffled(10, 3, 7)) for _ in range(2))
    assert [order.tolist() for order in one] == [order.tolist() for order in other]
    assert [len(order) for order in one] == [3] * 7
    for epoch in (one[:3], one[3:6]):
        assert len({index for order in epoch for index in order.tolist()}) == 9


def test_random_images_are_one_epoch() -> None:
    chosen = job.Job(1, (1.0, 1.0), "a", "b", 1, batches=5, epochs=3, size=4, learning_rate=0.1, data=job.RANDOM)
    assert (chosen.total, chosen.steps_per_epoch, chosen.part) == (5, 5, slice(2, 4))
    assert [list(x.shape) for x, _ in islice(chosen.stream(), 2)] == [[4, 3, 32, 32]] * 2
    assert len(chosen.net()) == 20


@pytest.mark.parametrize(
    ("times", "in_flight", "expected"),
    [
        ([0.0, 1.0, 2.0, 3.0], 1, 1.0),
        ([0.0, 3.0], 1, None),
        ([0.0, 1.0, 3.0], 4, 1.5),  # too few to see bursts, enough for a mean
        ([2.0 * (batch // 2) for batch in range(12)], 2, 1.0),
    ],
)
def test_seconds_per_batch(times: list[float], in_flight: int, expected: float | None) -> None:
    assert alternatives.period(times, in_flight) == expected


def test_a_round_of_several_batches_counts_as_these() -> None:
    variant = Variant("rounds", "flower", warm=1, batches_at_once=10)
    row = alternatives.sum_up([0.0, 20.0, 40.0, 60.0], variant, 128, sent=12_800_000, counted=2, plan={})
    assert row == {"samples_per_s": 64.0, "seconds_per_batch": 2.0, "bytes_per_sample": 5000.0, "measured": 30}


def test_ours_tells_how_long_a_batch_alone_takes() -> None:
    times = [0.0, *(5.0 + 2.0 * batch for batch in range(5)), *(14.0 + batch for batch in range(20))]
    row = alternatives.sum_up(times, Variant("ours", "ours", warm=10), 128, 0, 0, {"in_flight": 2})
    assert row["sync_seconds_per_batch"] == 2.0
    assert row["seconds_per_batch"] == 1.0
    assert alternatives.time_to(100, {"seconds_per_batch": 1.0, "sync_seconds_per_batch": 2.0}, 60) == 160.0
    assert alternatives.time_to(100, {"seconds_per_batch": 1.0}, 60) == 100.0


def test_ours_is_compared_with_the_best_other() -> None:
    report = Report("alternatives")
    cells = [("a alone", None, 4.0), ("DDP", 1.0, 2.0), ("Flower, 2 local steps", 1.0, 99.0), ("ours", 1.0, 8.0)]
    for method, rate, speed in cells:
        report.row("speed", method=method, rate_mbit=rate, samples_per_s=speed, seconds_per_batch=1 / speed, note="")
    report.row("speed", method="DDP, fp16 hook", rate_mbit=1.0, samples_per_s=None, note="stopped after 300 s")
    alternatives.compare(report)
    assert report.figures == {"speed at 1 Mbit/s: ours over a alone": 2.0}
    text = tables.alternatives({"rows": report.rows, "figures": report.figures})
    assert "| ours | 8.0 |" in text
    assert "| DDP, fp16 hook | stopped after 300 s |" in text


def test_ours_learns_at_every_depth_of_its_cells_and_is_timed_by_its_own() -> None:
    report, arguments = Report("alternatives"), command_line()
    settings = {"shares": arguments.shares, "size": arguments.size}
    for rate, depth in ((1.0, 5), (10.0, 4), (100.0, 4)):
        plan = {"in_flight": depth, "starts": [depth, 17]}
        report.row("speed", method="ours", rate_mbit=rate, samples_per_s=64.0, seconds_per_batch=0.5, plan=plan)
    report.row("speed", method="pi alone (50 %)", rate_mbit=None, samples_per_s=32.0, seconds_per_batch=1.0)
    ours = [variant for variant in alternatives.learners(report, arguments) if variant.method == "ours"]
    assert [variant.label for variant in ours] == ["ours, 4 in flight", "ours, 5 in flight"]
    assert [variant.options[-5:] for variant in ours] == [
        ("--in-flight", str(depth), "--starts", str(depth), "17") for depth in (4, 5)
    ]
    for method, rate, batches in (
        ("alone", 0.02, 40),
        ("ours, 4 in flight", 0.02, 50),
        ("ours, 5 in flight", 0.02, 60),
        ("ours, 5 in flight", 0.005, 20),  # another learning rate
        ("ours, 4 in flight, 8 alone first", 0.02, 10),
    ):
        lesson = {"target": 0.9, "epochs": 2, "learning_rate": rate, **settings}
        report.row("accuracy", method=method, batches_to_target=batches, **lesson)
    alternatives.measure_times(report, arguments)
    assert [row["seconds"] for row in report.rows["time"]] == [30.0, 10.0, 25.0, 25.0, 40.0]
    alternatives.compare(report)
    assert report.figures["time at 1 Mbit/s: ours over pi alone (50 %)"] == 40 / 10
    text = tables.alternatives({"rows": report.rows, "figures": report.figures})
    assert "| ours, 5 in flight | 0.005 | 20 |" in text
    assert text.count("|  | 1 Mbit/s | 10 Mbit/s | 100 Mbit/s |") == 2
    assert "| ours | 30 | 25 | 25 |" in text
    assert "| ours, learning rate 0.005 | 10 |  |  |" in text


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(10, 0.5), (20, 0.8), (30, 1.0)], 25.0),
        ([(10, 0.95), (20, 0.8)], 10 * 0.9 / 0.95),
        ([(10, 0.9)], 10.0),
        ([(10, 0.5), (20, 0.89)], None),
        ([], None),
    ],
)
def test_an_accuracy_is_reached_between_two_looks(curve: list[tuple[int, float]], expected: float | None) -> None:
    assert alternatives.batches_to(0.9, curve) == (None if expected is None else pytest.approx(expected))


def test_stages_of_1f1b_are_cut_for_devices_and_links() -> None:
    fast, slow = (alternatives.planned_cuts([1.0, 1.0, 1.0], rate, 8) for rate in (1e6, 0.01))
    assert 0 < fast[0] < fast[1] < 20
    # On a slow link, where the activations are smallest.
    assert slow[0] > fast[0]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("label", ["1F1B, 4 micro-batches", "DDP, fp16 hook"])
def test_a_cell_is_measured(label: str) -> None:
    arguments = command_line()
    (variant,) = [variant for variant in variants(arguments, (7, 14)) if variant.label == label]
    row = alternatives.speed(variant, 100.0, arguments)
    assert row["note"] == "", row
    assert row["samples_per_s"] > 0
    assert row["bytes_per_sample"] > 1000


@pytest.mark.usefixtures("root")
def test_a_process_that_fails_is_told_of() -> None:
    arguments = command_line()
    broken = Variant("broken", "pipeline", ("--cuts", "7", "14", "--micro-batches", "2"))
    row = alternatives.speed(broken, None, arguments)
    assert "ended: ValueError: Number of microbatches (2) must be" in row["note"]
    assert row["samples_per_s"] is None
