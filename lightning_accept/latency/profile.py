"""Measuring sub-models and codecs on the device at hand."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_accept.codecs import codec_from_config
from lightning_accept.latency.codec_rates import CodecRate, measure_codec
from lightning_accept.latency.dry_run import needs_grad
from lightning_accept.latency.interpreter import message_seconds
from lightning_accept.latency.memory import is_out_of_memory, memory_bytes
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.stack import Stack
from lightning_accept.latency.stand_in import make_generator, make_values
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.latency.timing import Clock, ProfileStopped, time_span

__all__ = ["Profile", "ProfileRequest", "ProfileStopped", "run_profile"]

# Two at once in one process would measure each other, and take each other's random state for their own.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Profile:
    """What was measured on a device.

    Attributes:
        measured: In the order of ``request.spans``; infinity where the device cannot run the sub-model.
        encode: Per codec cut: seconds of encoding its activations, its gradients.
        decode: Per codec cut: seconds of decoding its activations, its gradients.
        wire_bytes: Per codec cut: bytes of the encoded activations, gradients, without the framing.
        memory_free: Bytes that were free before the measuring; None where the system does not tell.
        message: Seconds of the device's compute that a message takes beside its codec; 0.0 if no codec was asked for.
    """

    measured: tuple[Measurement, ...]
    encode: tuple[tuple[float, float], ...] = ()
    decode: tuple[tuple[float, float], ...] = ()
    wire_bytes: tuple[tuple[int, int], ...] = ()
    memory_free: int | None = None
    message: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-able; infinity becomes null."""
        return {
            "measured": [[m.first, m.stop, _finite(m.forward), _finite(m.backward)] for m in self.measured],
            "encode": [list(pair) for pair in self.encode],
            "decode": [list(pair) for pair in self.decode],
            "wire_bytes": [list(pair) for pair in self.wire_bytes],
            "memory_free": self.memory_free,
            "message": self.message,
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: If it is not a profile.
        """
        try:
            measured = tuple(
                Measurement(_count(first), _count(stop), _seconds(there), _seconds(back))
                for first, stop, there, back in data["measured"]
            )
            encode, decode = (
                tuple((_seconds(there), _seconds(back)) for there, back in data[name]) for name in ("encode", "decode")
            )
            sizes = tuple((_count(there), _count(back)) for there, back in data["wire_bytes"])
            free, message = data["memory_free"], _seconds(data["message"])
            if not all(math.isfinite(value) for pair in (*encode, *decode, (message,)) for value in pair):
                raise ValueError("a codec's time is missing")
            return cls(measured, encode, decode, sizes, None if free is None else _count(free), message)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a profile: {error!r}") from error


def run_profile(
    request: ProfileRequest,
    device: torch.device,
    clock: Clock = time.perf_counter,
    stop: Callable[[], bool] = lambda: False,
    on_measured: Callable[[Measurement], None] = lambda measured: None,
) -> Profile:
    """Measure the sub-models of ``request`` on ``device``, one at a time in this process.

    Each is run as a stage runs it: forward in train mode, its inputs requiring gradients unless they are the model's
    own, then backward for inputs and parameters. Random state and settings are left as they were.

    Args:
        request: What to measure.
        device: Where.
        clock: Tells seconds.
        stop: Asked between runs; True ends the measuring.
        on_measured: Told of every sub-model when it is done, in an order that may differ from the request's.

    Raises:
        ProfileStopped: If ``stop`` said so.
    """
    with _alone(stop):
        stack = Stack(request.layers, request.cuts, request.tensors, device, request.autocast)
        free = memory_bytes(device)[0]
        limit = min(math.inf if request.memory is None else request.memory, math.inf if free is None else free)
        results: dict[Span, Measurement] = {}
        impossible: list[Span] = []
        with _random_state_kept(device) if stack.random() else nullcontext():
            # Short ones first: what does not fit is then met before all that contain it, which are not even tried.
            for span in sorted(set(request.spans), key=lambda span: (span[1] - span[0], span)):
                measured = None
                if request.estimate(span) <= limit and not any(_contains(span, part) for part in impossible):
                    measured = _try(stack, span, request.seconds, clock, stop)
                if measured is None:
                    impossible.append(span)
                    measured = Measurement(*span, math.inf, math.inf)
                results[span] = measured
                on_measured(measured)
            stack.release()
            rates = [_codec_rates(request, cut, device, clock, stop) for cut in request.codec_cuts]
        return Profile(
            tuple(results[span] for span in request.spans),
            tuple((there.encode, back.encode) for there, back in rates),
            tuple((there.decode, back.decode) for there, back in rates),
            tuple((there.nbytes, back.nbytes) for there, back in rates),
            free,
            message_seconds(clock) if request.codec_cuts else 0.0,
        )


def _try(stack: Stack, span: Span, budget: float, clock: Clock, stop: Callable[[], bool]) -> Measurement | None:
    """The measurement, or None if the memory does not suffice."""
    try:
        return time_span(stack, span, budget, clock, stop)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler, whose traceback holds the tensors.
    stack.release()
    gc.collect()
    if stack.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _codec_rates(
    request: ProfileRequest, cut: int, device: torch.device, clock: Clock, stop: Callable[[], bool]
) -> tuple[CodecRate, CodecRate]:
    assert request.forward_codec is not None and request.backward_codec is not None
    values = request.cuts[cut]
    tensors = make_values(values, device, make_generator())
    gradients = [tensor for tensor, value in zip(tensors, values, strict=True) if needs_grad(value, cut)]
    forward, backward = codec_from_config(request.forward_codec), codec_from_config(request.backward_codec)
    return (
        measure_codec(forward, tensors, device, request.seconds / 8, clock, stop),
        measure_codec(backward, gradients, device, request.seconds / 8, clock, stop),
    )


@contextmanager
def _alone(stop: Callable[[], bool]) -> Iterator[None]:
    while not _ONE_AT_A_TIME.acquire(timeout=0.1):
        if stop():
            raise ProfileStopped("measuring was stopped before it began")
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def _contains(span: Span, part: Span) -> bool:
    return span[0] <= part[0] and part[1] <= span[1]


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _seconds(value: Any) -> float:
    if value is None:
        return math.inf
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
