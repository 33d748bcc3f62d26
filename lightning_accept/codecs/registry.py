"""Codecs by name. Names from the network are looked up here, never imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_accept.codecs.base import Codec, CodecError, Payload
from lightning_accept.codecs.cast import Bf16, Fp16, Raw
from lightning_accept.codecs.multibit import MultiBit
from lightning_accept.codecs.stochastic import StochasticUniform

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw, Fp16, Bf16, MultiBit, StochasticUniform)}


def make_codec(codec: str | Codec) -> Codec:
    """A codec without state from a registered name or an instance.

    Raises:
        ValueError: If the name is not registered; the message lists those that are.
    """
    return codec.fresh() if isinstance(codec, Codec) else codec_from_config({"name": codec})


def codec_config(codec: Codec) -> dict[str, Any]:
    """The JSON-able description from which :func:`codec_from_config` rebuilds ``codec`` on another machine."""
    return {"name": codec.name, **codec.config()}


def codec_from_config(config: dict[str, Any]) -> Codec:
    """The inverse of :func:`codec_config`.

    Raises:
        ValueError: If the name is not registered or an argument does not fit.
    """
    arguments = dict(config)
    name = arguments.pop("name", None)
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}; choose one of {', '.join(sorted(CODECS))}")
    try:
        return CODECS[name](**arguments)
    except TypeError as error:
        raise ValueError(f"codec {name!r} does not take these arguments: {error}") from error


def decode(payload: Payload) -> Tensor:
    """Decode a payload of any registered codec.

    Raises:
        CodecError: If the codec is unknown or the payload is damaged.
    """
    name = payload.meta.get("codec")
    if not isinstance(name, str) or name not in CODECS:
        raise CodecError(f"payload of unknown codec {name!s:.100}")
    return CODECS[name].decode(payload)
