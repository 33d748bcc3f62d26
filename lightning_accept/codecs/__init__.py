"""What turns activations and gradients into few bytes."""

from lightning_accept.codecs.backend import warm_up
from lightning_accept.codecs.base import Codec, CodecError, NonFiniteError, Payload
from lightning_accept.codecs.cast import Bf16, Fp16, Raw
from lightning_accept.codecs.multibit import MultiBit
from lightning_accept.codecs.registry import codec_config, codec_from_config, decode, make_codec
from lightning_accept.codecs.stochastic import StochasticUniform

__all__ = [
    "Bf16",
    "Codec",
    "CodecError",
    "Fp16",
    "MultiBit",
    "NonFiniteError",
    "Payload",
    "Raw",
    "StochasticUniform",
    "codec_config",
    "codec_from_config",
    "decode",
    "make_codec",
    "warm_up",
]
