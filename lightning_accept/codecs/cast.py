"""Codecs that keep the values: raw bytes, or a shorter float dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accept.codecs.base import Codec, CodecError, NonFiniteError, Payload


class Raw(Codec):
    """The tensor as it is, bit for bit."""

    name: ClassVar[str] = "raw"

    @override
    def encode(self, tensor: Tensor) -> Payload:
        return raw_payload(tensor)

    @classmethod
    @override
    def decode(cls, payload: Payload) -> Tensor:
        if set(payload.tensors) != {"data"}:
            raise CodecError(f"a raw payload has one part called 'data', not {sorted(payload.tensors)}")
        return payload.tensors["data"]


def raw_payload(tensor: Tensor) -> Payload:
    """The payload of :class:`Raw`, to which other codecs fall back for tensors that they leave alone."""
    return Payload({"data": tensor.detach().to("cpu").contiguous()}, {"codec": Raw.name})


class _Cast(Codec):
    """Floating-point tensors in a two-byte dtype; all others bit for bit."""

    wire_dtype: ClassVar[torch.dtype]
    bits: int | None = 16

    @override
    def encode(self, tensor: Tensor) -> Payload:
        if not tensor.is_floating_point() or tensor.element_size() <= 2:
            return raw_payload(tensor)
        source = tensor.detach()
        data = source.to("cpu", self.wire_dtype).contiguous()
        if not bool(torch.isfinite(data).all()):
            if bool(torch.isfinite(source).all()):
                limit = torch.finfo(self.wire_dtype).max
                raise NonFiniteError(
                    f"a value of magnitude {float(source.abs().max()):.4g} does not fit codec {self.name!r}"
                    f" (largest {limit:.4g}); use 'bf16' or 'raw'"
                )
            raise NonFiniteError("the tensor holds NaN or infinity")
        return Payload({"data": data}, {"codec": self.name, "dtype": str(tensor.dtype).removeprefix("torch.")})

    @classmethod
    @override
    def decode(cls, payload: Payload) -> Tensor:
        dtype = {"float32": torch.float32, "float64": torch.float64}.get(str(payload.meta.get("dtype")))
        data = payload.tensors.get("data")
        if dtype is None or data is None or data.dtype != cls.wire_dtype:
            raise CodecError(f"not a payload of codec {cls.name!r}: {payload.meta}")
        return data.to(dtype)

    @override
    def wire_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return super().wire_bytes(shape, min(itemsize, 2))


class Fp16(_Cast):
    """IEEE half precision: 11 significant bits, largest value 65504."""

    name: ClassVar[str] = "fp16"
    wire_dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(_Cast):
    """bfloat16: 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16
