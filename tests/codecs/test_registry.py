from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_accept.codecs import (
    CodecError,
    MultiBit,
    Payload,
    codec_config,
    codec_from_config,
    decode,
    make_codec,
)


@pytest.mark.parametrize("name", ["raw", "fp16", "bf16", "multibit", "stochastic"])
def test_every_name_makes_a_codec_that_travels(name: str) -> None:
    codec = make_codec(name)
    assert codec.name == name
    again = codec_from_config(codec_config(codec))
    assert type(again) is type(codec)
    assert again.config() == codec.config()
    assert codec.last_error is None
    x = torch.randn(16, 32)
    assert decode(codec.encode(x)).shape == x.shape


def test_an_instance_is_a_template() -> None:
    template = MultiBit(3)
    template.encode(torch.randn(16, 32))
    copy = make_codec(template)
    assert copy is not template
    assert copy.last_error is None
    assert copy.bits == 3


def test_unknown_names_and_arguments() -> None:
    with pytest.raises(ValueError, match="choose one of bf16, fp16, multibit, raw, stochastic"):
        make_codec("zip")
    with pytest.raises(ValueError, match="does not take these arguments"):
        codec_from_config({"name": "multibit", "colour": "red"})


@pytest.mark.parametrize("name", ["zip", None, ["raw"], {"raw": 1}, 3])
def test_payloads_of_unknown_codecs_are_refused(name: Any) -> None:
    with pytest.raises(CodecError, match="unknown codec"):
        decode(Payload({"data": torch.zeros(3)}, {"codec": name}))
