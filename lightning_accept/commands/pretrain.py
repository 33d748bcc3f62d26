"""``lightning-accept pretrain``: a latency predictor from data of many device configurations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.training import pretrain


@dataclass(frozen=True)
class PretrainOptions:
    """What ``lightning-accept pretrain`` is given.

    Attributes:
        data: Data sets of the same model.
        out: The predictor's file.
        steps: Steps of training its network; None for the default.
        seed: Of everything random.
    """

    data: Sequence[str]
    out: str
    steps: int | None
    seed: int


def run_pretrain(options: PretrainOptions) -> int:
    """Train and save a predictor; returns the process's exit code (0, or 2 if the data does not do)."""
    try:
        dataset = Dataset.merge([Dataset.load(path) for path in options.data])
        settings = {} if options.steps is None else {"steps": options.steps}
        predictor = pretrain(dataset, seed=options.seed, **settings)
        predictor.save(options.out)
    except (OSError, ValueError) as error:
        print(f"lightning-accept pretrain: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.out}: latency predictor of {dataset.model.name}, batch {dataset.model.batch}, from"
        f" {len(dataset.configurations)} device configurations"
    )
    return 0
