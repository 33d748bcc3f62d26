"""Measuring all sub-models twice over, in sweeps through a fixed time, in the process started for it."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch

from lightning_accept.latency.conditions import Condition
from lightning_accept.latency.memory import is_out_of_memory
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.stack import Stack
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.latency.timing import Clock, ProfileStopped, time_once

SHORT = 0.04
"""Seconds: a sub-model that takes less is run several times at each visit, after a warm-up; longer ones once."""
_VISIT = 0.12
_MOST_RUNS = 5


def sweep(
    stack: Stack,
    spans: Sequence[Span],
    seconds: float,
    clock: Clock = time.perf_counter,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[list[Measurement], list[Measurement]]:
    """Measure every sub-model in two independent passes, by turns, so that both meet the same slow changes.

    The first sweep through the sub-models is completed however long it takes. Others follow as long as there is
    time; the last may be cut short. Each goes through the sub-models in an order of its own.

    Args:
        stack: The layers.
        spans: The sub-models.
        seconds: Time for all.
        clock: Tells seconds.
        stop: Asked before every sub-model.
        on_progress: Told of the share that is done.

    Returns:
        Medians of both passes (the lower of two), in the order of ``spans``; the second may lack some. Infinity where
        the memory does not suffice.

    Raises:
        ProfileStopped: If ``stop`` says so.
    """
    passes: list[dict[Span, list[tuple[float, float]]]] = [{}, {}]
    impossible: set[Span] = set()
    began = clock()
    _warm_up(stack, spans, impossible, clock)
    sweeps = visits = 0
    while sweeps == 0 or clock() - began < seconds:
        order = [span for span in spans if span not in impossible]
        random.Random(sweeps).shuffle(order)
        results = passes[sweeps % 2]
        for span in order:
            if stop():
                raise ProfileStopped("measuring was stopped")
            if sweeps > 0 and clock() - began >= seconds:
                break
            time_taken = _visit(stack, span, clock)
            if time_taken is None:
                impossible.add(span)
            else:
                results.setdefault(span, []).append(time_taken)
            visits += 1
            on_progress(min(visits / len(spans) if sweeps == 0 else 1.0, max(0.01, (clock() - began) / seconds)))
        sweeps += 1
        if not order:
            break
    for span in impossible:
        for results in passes:
            results[span] = [(math.inf, math.inf)]
    # What disturbs a run makes it slower, so of two the faster is nearer to the truth.
    first, second = (
        [Measurement(*span, *_median(results[span])) for span in spans if span in results] for results in passes
    )
    return first, second


def _warm_up(stack: Stack, spans: Sequence[Span], impossible: set[Span], clock: Clock) -> None:
    """Run every layer once, by the shortest sub-models that hold it, so that kernels and memory are ready."""
    ready: set[int] = set()
    for span in sorted(spans, key=lambda span: span[1] - span[0]):
        if not ready.issuperset(range(*span)):
            ready.update(range(*span))
            if _visit(stack, span, clock) is None:
                impossible.add(span)


def _visit(stack: Stack, span: Span, clock: Clock) -> tuple[float, float] | None:
    """Seconds of forward and backward, the median of several runs for a short sub-model; None if it does not fit."""
    try:
        stack.load(span)
        runs = [time_once(stack, clock)]
        if sum(runs[0]) < SHORT:
            runs = [time_once(stack, clock)]
            while len(runs) < _MOST_RUNS and sum(map(sum, runs)) < _VISIT:
                runs.append(time_once(stack, clock))
        return _median(runs)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    stack.release()
    gc.collect()
    return None


def _median(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The run whose seconds are the median of all, the lower one of an even number."""
    return sorted(runs, key=sum)[(len(runs) - 1) // 2]


def main(config: dict[str, Any], output: TextIO) -> int:
    """Measure in this process what ``config`` says, and write one JSON object per line.

    Lines ``{"progress": share}`` come first, at last ``{"measured": [[first, stop, forward, backward], ...],
    "repeats": [...]}`` with null for infinity.

    Args:
        config: ``condition`` (JSON of a :class:`Condition`), ``request`` (file that :func:`.collect.write_request`
            wrote), ``seconds``, and ``parent``, the process id of who started this process.
        output: Where the lines go.
    """
    from lightning_accept.latency.collect import read_request

    condition = Condition(**config["condition"])
    request: ProfileRequest = read_request(config["request"])
    parent = config["parent"]
    last = [0.0]

    def progress(share: float) -> None:
        if share >= last[0] + 0.01:
            last[0] = share
            print(json.dumps({"progress": share}), file=output, flush=True)

    # Its pauses would be taken for the layers'.
    gc.disable()
    with condition.applied():
        stack = Stack(
            request.layers,
            request.cuts,
            request.tensors,
            torch.device(condition.device),
            condition.autocast,
            condition.channels_last,
            keep=True,
        )
        measured, repeats = sweep(
            stack, request.spans, config["seconds"], stop=lambda: os.getppid() != parent, on_progress=progress
        )
    rows = {"measured": [_row(one) for one in measured], "repeats": [_row(one) for one in repeats]}
    print(json.dumps(rows), file=output, flush=True)
    return 0


def _row(one: Measurement) -> list[int | float | None]:
    return [one.first, one.stop, *([one.forward, one.backward] if one.possible else [None, None])]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.stdin.readline()), sys.stdout))
