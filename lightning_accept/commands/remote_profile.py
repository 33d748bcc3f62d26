"""Measuring all sub-models on a worker, a few at a time."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_accept.latency.dataset import Configuration
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.pipeline.transport import WorkerHandle

_AT_A_TIME = 16
_FACTS = ("device", "threads", "machine", "host", "torch", "version")


def profile_worker(
    worker: WorkerHandle,
    request: ProfileRequest,
    holder: str,
    timeout: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Configuration:
    """Claim a worker, measure the sub-models of ``request`` on it, and release it.

    Args:
        worker: The worker.
        request: What to measure.
        holder: Who claims it, for others to read.
        timeout: Seconds that a few sub-models may take.
        on_progress: Told of the share that is done.

    Raises:
        PipelineError: If the worker is busy, cannot be reached, or cannot measure.
    """
    facts = worker.claim(f"profile-{secrets.token_hex(8)}", holder, secrets.token_urlsafe(32))
    try:
        measured = _measure(worker, request, timeout, on_progress)
    finally:
        worker.release()
        worker.close()
    return Configuration(worker.name, tuple(measured), description=_description(facts))


def _measure(
    worker: WorkerHandle, request: ProfileRequest, timeout: float, on_progress: Callable[[float], None]
) -> list[Measurement]:
    results: dict[Span, Measurement] = {}
    # Short ones first: what does not fit is then not tried as a part of others.
    left = sorted(request.spans, key=lambda span: (span[1] - span[0], span))
    while left:
        some, left = left[:_AT_A_TIME], left[_AT_A_TIME:]
        impossible = [one.span for one in results.values() if not one.possible]
        hopeless = [span for span in some if _contains_any(span, impossible)]
        results.update({span: Measurement(*span, math.inf, math.inf) for span in hopeless})
        wanted = tuple(span for span in some if span not in results)
        if wanted:
            profile = worker.profile(replace(request, spans=wanted), timeout)
            results.update({one.span: one for one in profile.measured})
        on_progress(1.0 - len(left) / len(request.spans))
    return [results[span] for span in request.spans]


def _contains_any(span: Span, parts: Sequence[Span]) -> bool:
    return any(span[0] <= first and stop <= span[1] for first, stop in parts)


def _description(facts: dict[str, Any]) -> dict[str, str | int | float | bool | None]:
    return {name: facts[name] for name in _FACTS if isinstance(facts.get(name), str | int | float | bool)}
