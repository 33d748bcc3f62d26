"""How many bytes cross each cut, with the codecs in force."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lightning_accept.codecs import Codec
from lightning_accept.graph import Chain
from lightning_accept.graph.program import CutValue
from lightning_accept.latency.model_facts import CutFact

MESSAGE_BYTES = 1300
"""What one message takes beside its tensors: HTTP's headers, the metadata of frame and packet, and the reply to
the message that comes the other way."""
_SMALL = 8
"""An output is small up to this part (one over it) of a typical cut's bytes: what the default codec leaves of those."""


def at_width(codec: Codec, bits: int | None) -> Codec:
    """A codec like ``codec`` with another bit width, where it has one."""
    fresh = codec.fresh()
    if bits is not None and fresh.bits is not None:
        fresh.bits = bits
    return fresh


def resized(cut: Sequence[CutValue], traced: int, batch: int) -> list[tuple[int, ...]]:
    """Shapes of a cut's values for another batch size.

    Args:
        cut: The values.
        traced: The batch size they were traced with; dynamic dimensions are multiples of it.
        batch: The batch size wanted.
    """
    return [
        tuple(
            -(-size * batch // traced) if position in value.dynamic and size % traced == 0 else size
            for position, size in enumerate(value.shape)
        )
        for value in cut
    ]


def small_output(cut_bytes: Sequence[int]) -> bool:
    """Whether nothing is won by compressing the module's output: it is small against the cuts before it.

    A classifier's logits are. Rounding them would cost accuracy, since the loss is computed from them, and save
    next to nothing.

    Args:
        cut_bytes: Bytes that cross each cut without a codec, the input's left out; the last one is the output.
    """
    *inner, output = cut_bytes
    return not inner or _SMALL * output <= statistics.median(inner)


def cut_bytes(chain: Chain) -> list[int]:
    """Bytes per job, as traced and without a codec, that cross each cut after the input: ``[layers]``."""
    return [sum(value.nbytes for value in chain.cut(index)) for index in range(1, len(chain.layers) + 1)]


def crossing(
    chain: Chain,
    forward_codec: Codec,
    backward_codec: Codec,
    bits: Mapping[str, int],
    batch: int | None = None,
    output_codecs: tuple[Codec, Codec] | None = None,
) -> tuple[list[int], list[int]]:
    """Bytes per job of the activations and of the gradients that cross each cut, framing included.

    Args:
        chain: The layers.
        forward_codec: For activations.
        backward_codec: For gradients.
        bits: Bit widths in force, ``forward`` and ``backward``; a codec's own where one is missing.
        batch: Samples per job; None for as many as were traced.
        output_codecs: For the output and its gradient, where they are others.

    Returns:
        Two lists ``[layers + 1]``; entry p is the cut before layer p, the last one the output.
    """
    traced = chain.batch
    cuts = [
        [
            CutFact(shape, value.dtype.itemsize, value.differentiable)
            for value, shape in zip(cut, resized(cut, traced, batch or traced), strict=True)
        ]
        for cut in map(chain.cut, range(len(chain.layers) + 1))
    ]
    usual = forward_codec, backward_codec
    inner, last = (
        (at_width(forward, bits.get("forward")), at_width(backward, bits.get("backward")))
        for forward, backward in (usual, output_codecs or usual)
    )
    return message_bytes(cuts, inner, last)


def message_bytes(
    cuts: Sequence[Sequence[CutFact]], codecs: tuple[Codec, Codec], output_codecs: tuple[Codec, Codec]
) -> tuple[list[int], list[int]]:
    """Bytes of the messages that cross each cut forward and backward, framing included.

    Args:
        cuts: The values of each cut, the input's first and the output's last.
        codecs: For activations and for gradients.
        output_codecs: For the output and for its gradient.
    """
    down, up = [], []
    for index, cut in enumerate(cuts):
        forward, backward = output_codecs if index == len(cuts) - 1 else codecs
        gradients = [value for value in cut if value.differentiable]
        down.append(MESSAGE_BYTES + sum(forward.wire_bytes(value.shape, value.itemsize) for value in cut))
        up.append(MESSAGE_BYTES + sum(backward.wire_bytes(value.shape, value.itemsize) for value in gradients))
    return down, up
