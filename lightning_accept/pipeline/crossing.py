"""How many bytes cross each cut, with the codecs in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_accept.codecs import Codec
from lightning_accept.graph import Chain
from lightning_accept.graph.program import CutValue

MESSAGE_BYTES = 1300
"""What one message takes beside its tensors: HTTP's headers, the metadata of frame and packet, and the reply to
the message that comes the other way."""


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


def crossing(
    chain: Chain, forward_codec: Codec, backward_codec: Codec, bits: Mapping[str, int], batch: int | None = None
) -> tuple[list[int], list[int]]:
    """Bytes per job of the activations and of the gradients that cross each cut, framing included.

    Args:
        chain: The layers.
        forward_codec: For activations.
        backward_codec: For gradients.
        bits: Bit widths in force, ``forward`` and ``backward``; a codec's own where one is missing.
        batch: Samples per job; None for as many as were traced.

    Returns:
        Two lists ``[layers + 1]``; entry p is the cut before layer p, the last one the output.
    """
    traced = chain.batch
    forward, backward = at_width(forward_codec, bits.get("forward")), at_width(backward_codec, bits.get("backward"))
    down, up = [], []
    for index in range(len(chain.layers) + 1):
        cut = chain.cut(index)
        sized = list(zip(cut, resized(cut, traced, batch or traced), strict=True))
        down.append(MESSAGE_BYTES + sum(forward.wire_bytes(shape, value.dtype.itemsize) for value, shape in sized))
        gradients = [(value, shape) for value, shape in sized if value.differentiable]
        up.append(MESSAGE_BYTES + sum(backward.wire_bytes(shape, value.dtype.itemsize) for value, shape in gradients))
    return down, up
