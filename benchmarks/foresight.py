"""Do predictions hold on emulated devices? Needs root and Linux, see edge/.

    python benchmarks/foresight.py [simulate] [change] [--quick] [--json FILE]

1. *Simulate*: a central node and two workers with unequal CPU shares, links from 1 to 100 Mbit/s. The batch period that
   planner and simulator predict, against the measured one in the steady state: from what was measured before training,
   and from what training has told until its end.
2. *Change*: a worker's CPU share is cut to a third while training. Whether that is noticed, which layers move, and the
   batch period afterwards against that of the best partition, which is found by trying all.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from devices import NAMES, Devices, Setting, steady
from report import Report

SETTINGS = [
    Setting(("1mbit",) * 3, (60, 40, 20)),
    Setting(("2mbit",) * 3, (40, 30, 60)),
    Setting(("4mbit",) * 3, (60, 20, 40)),
    Setting(("10mbit",) * 3, (50, 50, 25)),
    Setting(("20mbit",) * 3, (30, 60, 30)),
    Setting(("50mbit",) * 3, (60, 25, 45)),
    Setting(("100mbit",) * 3, (60, 30, 15)),
    Setting(("100mbit", ("4mbit", "10mbit"), "2mbit"), (40, 40, 30)),
    Setting(("20mbit", "100mbit", ("1mbit", "4mbit")), (50, 25, 50)),
    Setting(("10mbit", "4mbit", "10mbit"), (60, 40, 25), (0.0, 0.005, 0.01)),
]


def simulate(report: Report, quick: bool) -> None:
    """Item 1."""
    batches = 40 if quick else 56
    errors: dict[str, list[float]] = {"planned": [], "informed": []}
    devices: Devices | None = None
    try:
        for number, setting in enumerate(SETTINGS[3:4] if quick else SETTINGS):
            if devices is None or devices.setting.delays != setting.delays:
                if devices is not None:
                    devices.__exit__(None, None, None)
                devices = Devices(setting).__enter__()
            found = devices.train(["--batches", str(batches), "--batch-size", "128"], setting)
            plan = found["plans"][-1]
            # Warm-up at the beginning, drain at the end.
            measured = steady(found["times"][10 : -plan["in_flight"]], plan["in_flight"])
            planned, informed = plan["period"], found["end"]["period"]
            errors["planned"].append(planned / measured - 1)
            errors["informed"].append(informed / measured - 1)
            report.row(
                "simulate",
                setting=number,
                rates=setting.rates,
                cpu=setting.shares,
                delays_s=setting.delays,
                starts=plan["starts"],
                in_flight=plan["in_flight"],
                bottleneck=plan["bottleneck"],
                planned_s=planned,
                informed_s=informed,
                measured_s=measured,
                planned_error=errors["planned"][-1],
                informed_error=errors["informed"][-1],
                measured_over_bound=measured / plan["bound"],
            )
            _keep(report, f"simulate {number}", found)
            sys.stdout.flush()
    finally:
        if devices is not None:
            devices.__exit__(None, None, None)
    for name, values in errors.items():
        report.figure(f"{name}_within_10_percent", f"{sum(abs(value) <= 0.1 for value in values)} of {len(values)}")


def change(report: Report, quick: bool) -> None:
    """Item 2."""
    setting = Setting(("100mbit",) * 3, (50, 45, 45))
    slowed = Setting(setting.rates, (50, 15, 45))
    batches, cut_after = (120, 30) if quick else (300, 60)
    net = ["--net", "blocks", "--batches"]
    with Devices(setting) as devices:
        looking = ["--feedback", "10", "--repartition", "20"]
        found = devices.train([*net, str(batches), *looking], after=cut_after, cut=(NAMES[1], slowed.shares[1]))
        tried = devices.train([*net, "100000", "--try-all", "14" if quick else "24"], slowed)
    noticed = [line["batch"] for line in found["log"] if line["line"].startswith("feedback: stage")]
    moved = [plan for plan in found["plans"] if plan["batch"] > cut_after]
    before, after = found["plans"][0], found["plans"][-1]
    times = found["times"]
    period_before = steady(times[10:cut_after], before["in_flight"])
    still = cut_after + 1, moved[0]["batch"] if moved else len(times)
    period_after = steady(times[after["batch"] + 5 : -after["in_flight"]], after["in_flight"])
    report.row(
        "change",
        cut_after=cut_after,
        noticed_after=next((batch for batch in noticed if batch > cut_after), None),
        false_alarms=sum(batch <= cut_after for batch in noticed),
        moved_after=[plan["batch"] for plan in moved],
        starts=[plan["starts"] for plan in found["plans"]],
        period_before_s=period_before,
        period_slowed_s=(times[still[1] - 1] - times[still[0]]) / max(1, still[1] - 1 - still[0]),
        period_after_s=period_after,
    )
    _keep(report, "change", found)
    best = _best(report, tried)
    report.figure("noticed", any(batch > cut_after for batch in noticed))
    report.figure("moved", bool(moved))
    report.figure("after_over_best", period_after / best)


def _best(report: Report, tried: dict[str, Any]) -> float:
    """The shortest period of all partitions that were tried."""
    periods: list[float] = []
    times = tried["times"]
    depths = {plan["batch"]: plan["in_flight"] for plan in tried["plans"]}
    ends = [one["batch"] for one in tried["tried"][1:]] + [len(times)]
    for one, end in zip(tried["tried"], ends, strict=True):
        first = one["batch"]
        in_flight = next(depths[batch] for batch in sorted(depths, reverse=True) if batch <= first + 1)
        part = times[first + in_flight : end - in_flight]
        periods.append((part[-1] - part[0]) / (len(part) - 1))
        report.row("tried", starts=one["starts"], in_flight=in_flight, period_s=periods[-1])
    return min(periods)


def _keep(report: Report, run: str, found: dict[str, Any]) -> None:
    """Keep all that a run has told among the raw figures, without printing it."""
    report.rows.setdefault("runs", []).append({"run": run, **found})


PARTS = {"simulate": simulate, "change": change}


def main() -> None:
    """Run the parts that are asked for; all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of: {' '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="one setting, fewer batches, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    report = Report("foresight", arguments.quick)
    for name in arguments.parts or PARTS:
        PARTS[name](report, arguments.quick)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
