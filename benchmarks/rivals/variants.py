"""The methods that are compared, with their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from devices import NAMES
from methods import SCALED

SYNC = 6
"""Batches at the start of ours with one in flight, where speed is measured."""
FILLING = 12
"""Batches of ours that are left out after these."""


@dataclass(frozen=True)
class Variant:
    """A method with its options.

    Attributes:
        label: What it is called in tables.
        method: Of ``python -m rivals``.
        options: Of the same.
        warm: Batches that are left out at the start.
        host: The only host that takes part; None for all.
        package: What must be installed.
        batches_at_once: Batches in what is printed as one.
        workers: Workers of ours.
    """

    label: str
    method: str
    options: tuple[str, ...] = ()
    warm: int = 3
    host: str | None = None
    package: str | None = None
    batches_at_once: int = 1
    workers: int = 2


def variants(arguments: argparse.Namespace, cuts: Sequence[int]) -> list[Variant]:
    """All methods.

    Args:
        arguments: The command line.
        cuts: First layers of the later stages of 1F1B.
    """
    alone = [
        Variant(f"{name} alone ({share:g} %)", "single", host=name)
        for name, share in zip(NAMES, arguments.shares, strict=True)
    ]
    places = tuple(str(cut) for cut in cuts)
    pipelines = [
        Variant(f"1F1B, {count} micro-batches", "pipeline", ("--cuts", *places, "--micro-batches", str(count)))
        for count in arguments.micro_batches
    ]
    rank = str(arguments.powersgd_rank)
    parallel = [
        Variant("DDP", "data-parallel", ("--hook", "none"), warm=2),
        Variant("DDP, fp16 hook", "data-parallel", ("--hook", "fp16"), warm=2),
        # Its first two steps are not compressed.
        Variant(f"DDP, PowerSGD rank {rank}", "data-parallel", ("--hook", "powersgd", "--powersgd-rank", rank), warm=4),
    ]
    steps = arguments.local_steps
    others = [
        Variant("hivemind, 8 bits", "hivemind", package="hivemind"),
        Variant(
            f"Flower, {steps} local steps",
            "flower",
            ("--local-steps", str(steps)),
            warm=1,
            package="flwr",
            batches_at_once=steps,
        ),
    ]
    return [*alone, *pipelines, *parallel, *others, our_variant(arguments)]


def our_label(in_flight: int | None = None, sync: int = 0, scaled: bool = False) -> str:
    """What ours is called.

    Args:
        in_flight: Batches in flight; None where they are as planned.
        sync: Batches at the start with one in flight.
        scaled: Whether learning rates are divided by staleness.
    """
    depth = "" if in_flight is None else f", {in_flight} in flight"
    return f"ours{depth}" + (f", {sync} alone first" if sync else "") + (SCALED if scaled else "")


def our_variant(arguments: argparse.Namespace) -> Variant:
    """Ours; it begins with one batch in flight, for the time that such a batch takes."""
    if arguments.quick:
        options = ("--sync", "2", "--in-flight", "3", "--starts", "7", "14")
        return Variant("ours", "ours", (*our_options(arguments), *options), warm=6)
    depth = arguments.in_flight
    options = (*our_options(arguments), "--sync", str(SYNC), *(() if depth is None else ("--in-flight", str(depth))))
    return Variant(our_label(depth), "ours", options, warm=SYNC + FILLING)


def our_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What ours is."""
    predictor = ("--predictor", arguments.predictor) if arguments.predictor else ()
    return "--our-method", arguments.our_method, *predictor
