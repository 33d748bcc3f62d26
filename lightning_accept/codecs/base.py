"""The codec interface: a tensor becomes named tensors and metadata, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor


class CodecError(ValueError):
    """A tensor cannot be encoded, or a payload cannot be decoded."""


class NonFiniteError(CodecError):
    """A tensor holds NaN or infinity, which a lossy codec must never turn into finite values."""


@dataclass(frozen=True)
class Payload:
    """What travels in place of one tensor.

    Attributes:
        tensors: The named parts, each a contiguous CPU tensor of any dtype.
        meta: JSON-able facts that :func:`lightning_accept.codecs.decode` needs besides the parts. ``meta["codec"]``
            names the codec. A payload describes itself completely: decoding needs no state.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes, without the framing."""
        return sum(part.numel() * part.element_size() for part in self.tensors.values())


class Codec(ABC):
    """Encodes the tensors that cross one link in one direction.

    An instance given to the strategy is a *template*. Every link and direction gets its own copy through
    :meth:`fresh`, because a codec may carry state (levels, buffers) from batch to batch. Encoding happens in the
    sender's thread, decoding in the receiver's, one call at a time per instance.
    """

    name: ClassVar[str]
    """The registered short name, also ``meta["codec"]`` of every payload."""

    bits: int | None = None
    """Current bit width where the codec has one; may be set between two calls of :meth:`encode`."""

    last_error: float | None = None
    """Relative squared error of the last encoded tensor, ``|x - decoded|^2 / |x|^2``, where the codec knows it."""

    def start_epoch(self) -> None:  # noqa: B027 - most codecs have nothing to do
        """Called on every instance when a training epoch begins."""

    def prepare(self) -> None:  # noqa: B027 - most codecs have nothing to do
        """Called before the first batch on every device that encodes or decodes: whatever takes time is done now."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> Payload:
        """Encode ``tensor`` (any shape, dtype and device).

        Raises:
            NonFiniteError: If a lossy codec meets NaN or infinity.
        """

    @classmethod
    @abstractmethod
    def decode(cls, payload: Payload) -> Tensor:
        """Rebuild a CPU tensor of the original shape and dtype.

        Raises:
            CodecError: If the payload is not one that this codec could have written.
        """

    def config(self) -> dict[str, Any]:
        """Constructor arguments as JSON-able values; together with :attr:`name` they rebuild this codec elsewhere."""
        return {}

    def fresh(self) -> Codec:
        """A codec with the same configuration and no state."""
        return type(self)(**self.config())

    def wire_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that a tensor of ``shape`` with ``itemsize`` bytes per element takes on the wire, framing left out."""
        count = itemsize
        for size in shape:
            count *= size
        return count
