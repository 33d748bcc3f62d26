"""How long codecs take for what crosses a cut, and what they make of it in bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_accept.codecs import Codec, decode
from lightning_accept.latency.timing import MAX_REPEATS, MIN_REPEATS, Clock, ProfileStopped, synchronise


@dataclass(frozen=True)
class CodecRate:
    """What a codec takes for the tensors of one message.

    Attributes:
        encode: Seconds, the copy from the device counted.
        decode: Seconds, the copy to the device counted.
        nbytes: Bytes of the payloads, without the framing.
    """

    encode: float = 0.0
    decode: float = 0.0
    nbytes: int = 0


def measure_codec(
    codec: Codec,
    tensors: Sequence[Tensor],
    device: torch.device,
    budget: float,
    clock: Clock,
    stop: Callable[[], bool],
) -> CodecRate:
    """Encode and decode ``tensors`` repeatedly; medians, after two warm-ups.

    Each tensor has a codec of its own, as on a link. A codec with state is measured as it is from its second batch on.

    Args:
        codec: A template.
        tensors: What crosses the cut in one message; none if nothing does.
        device: Where they lie and where they are to go.
        budget: Seconds.
        clock: Tells seconds.
        stop: Asked before every repeat.

    Raises:
        ProfileStopped: If ``stop`` says so.
    """
    if not tensors:
        return CodecRate()
    codecs = [codec.fresh() for _ in tensors]
    for each in codecs:
        each.prepare()
    end = clock() + budget
    encoding: list[float] = []
    decoding: list[float] = []
    warm_ups = 2
    while True:
        if stop():
            raise ProfileStopped("measuring was stopped")
        began = clock()
        payloads = [each.encode(tensor) for each, tensor in zip(codecs, tensors, strict=True)]
        between = clock()
        for payload in payloads:
            decode(payload).to(device)
        synchronise(device)
        finished = clock()
        if warm_ups:
            warm_ups -= 1
            continue
        encoding.append(between - began)
        decoding.append(finished - between)
        more = len(encoding) < MAX_REPEATS and finished + (finished - began) <= end
        if len(encoding) >= MIN_REPEATS and not more:
            nbytes = sum(payload.nbytes for payload in payloads)
            return CodecRate(statistics.median(encoding), statistics.median(decoding), nbytes)
