"""What is to be measured on a device, and its form on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_accept.codecs import Codec, codec_config, codec_from_config
from lightning_accept.graph import CutValue, StageProgram
from lightning_accept.graph.encoding import DTYPES
from lightning_accept.latency.dry_run import dry_run
from lightning_accept.latency.submodels import Span

if TYPE_CHECKING:
    # Workers are spared the exporter and sympy.
    from lightning_accept.graph import Chain, Trace

MAX_LAYERS = 10_000
MAX_SPANS = 20_000
MAX_SECONDS = 60.0
"""Per sub-model."""
_MAX_BYTES = 2**50
_AUTOCAST = ("bfloat16", "float16")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ProfileRequest:
    """Sub-models to measure. Parameters are made up from their shapes, since times do not depend on their values.

    Attributes:
        layers: One program per layer of the model, in order; a sub-model is run by chaining them.
        cuts: What enters each layer in train mode, and last the outputs; shapes and dtypes of the real run.
        spans: The sub-models.
        tensors: Buffers and constants, ``buffer/NAME`` and ``const/NAME``.
        autocast: Name of the autocast dtype, or None.
        forward_codec: Configuration of the codec for activations, or None to leave codecs out.
        backward_codec: The same for gradients.
        codec_cuts: The cuts at which the codecs are measured.
        seconds: Time for each sub-model; two repeats are made in any case.
        memory: Bytes that a sub-model may take; one estimated above is skipped and marked.
        layer_bytes: Estimated memory of training each layer: weights, gradients, what its backward needs; empty if
            there is no estimate.

    Raises:
        ValueError: If the parts do not fit each other or are out of range.
    """

    layers: tuple[StageProgram, ...]
    cuts: tuple[tuple[CutValue, ...], ...]
    spans: tuple[Span, ...]
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    autocast: str | None = None
    forward_codec: dict[str, Any] | None = None
    backward_codec: dict[str, Any] | None = None
    codec_cuts: tuple[int, ...] = ()
    seconds: float = 1.0
    memory: float | None = None
    layer_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of(
        cls,
        chain: Chain,
        trace: Trace,
        spans: Iterable[Span],
        *,
        batch: int | None = None,
        autocast: str | None = None,
        forward_codec: Codec | None = None,
        backward_codec: Codec | None = None,
        codec_cuts: Iterable[int] = (),
        seconds: float = 1.0,
        memory: float | None = None,
    ) -> ProfileRequest:
        """The request for sub-models of a traced module.

        Args:
            chain: The module's layers.
            trace: The traced module.
            spans: The sub-models.
            batch: Another batch size than the traced one.
            autocast: Name of the autocast dtype, or None.
            forward_codec: For activations, or None to leave codecs out.
            backward_codec: For gradients.
            codec_cuts: Where the codecs are measured.
            seconds: Time for each sub-model.
            memory: Bytes that a sub-model may take.

        Raises:
            ValueError: If the module cannot be run with that batch size.
        """
        count = len(chain.layers)
        layers = tuple(chain.program(index, index + 1) for index in range(count))
        cuts = tuple(tuple(chain.cut(index)) for index in range(count + 1))
        if batch is not None:
            cuts = (_with_batch(cuts[0], batch), *cuts[1:])
        try:
            found = dry_run(layers, cuts, autocast)
        except Exception as error:
            size = "its traced batch size" if batch is None else f"batch size {batch}"
            raise ValueError(f"the module cannot be profiled at {size}: {error}") from error
        tensors: dict[str, Tensor] = {}
        for program in layers:
            tensors.update((f"buffer/{name}", trace.buffers[name].detach().cpu()) for name in program.buffers)
            tensors.update((f"const/{name}", constant.cpu()) for name, constant in program.constants.items())
        return cls(
            layers,
            found.cuts,
            tuple(spans),
            tensors,
            autocast,
            None if forward_codec is None else codec_config(forward_codec),
            None if backward_codec is None else codec_config(backward_codec),
            tuple(codec_cuts),
            seconds,
            memory,
            found.layer_bytes,
        )

    def estimate(self, span: Span) -> int:
        """Bytes that a sub-model takes at least, or 0 if there is no estimate.

        What its layers need, and twice the largest cut: an activation and its gradient on their way.
        """
        first, stop = span
        if not self.layer_bytes:
            return 0
        largest = max(sum(value.nbytes for value in cut) for cut in self.cuts[first : stop + 1])
        return sum(self.layer_bytes[first:stop]) + 2 * largest

    def to_message(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON-able fields, and the tensors that travel beside them."""
        message = {
            "layers": [program.to_json() for program in self.layers],
            "cuts": [[_value_to_json(value) for value in cut] for cut in self.cuts],
            "spans": [list(span) for span in self.spans],
            "autocast": self.autocast,
            "forward_codec": self.forward_codec,
            "backward_codec": self.backward_codec,
            "codec_cuts": list(self.codec_cuts),
            "seconds": self.seconds,
            "memory": self.memory,
            "layer_bytes": list(self.layer_bytes),
        }
        return message, dict(self.tensors)

    @classmethod
    def from_message(cls, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ProfileRequest:
        """The inverse of :meth:`to_message`, which checks everything.

        Raises:
            ValueError: If it is not a request, or out of range.
        """
        _expect(isinstance(message, Mapping) and set(message) == _FIELDS, f"its fields must be {sorted(_FIELDS)}")
        for name in ("layers", "cuts", "spans", "codec_cuts", "layer_bytes"):
            _expect(isinstance(message[name], list), f"{name!r} must be a list")
        _expect(len(message["layers"]) <= MAX_LAYERS, f"it has more than {MAX_LAYERS} layers")
        _expect(len(message["spans"]) <= MAX_SPANS, f"it asks for more than {MAX_SPANS} sub-models")
        _expect(all(isinstance(text, str) for text in message["layers"]), "a layer's program must be a string")
        _expect(all(isinstance(cut, list) for cut in message["cuts"]), "a cut must be a list")
        pairs = message["spans"]
        _expect(all(isinstance(pair, list) and len(pair) == 2 for pair in pairs), "a span must be two numbers")
        return cls(
            tuple(StageProgram.from_json(text) for text in message["layers"]),
            tuple(tuple(_value_from_json(value) for value in cut) for cut in message["cuts"]),
            tuple((first, stop) for first, stop in pairs),
            dict(tensors),
            message["autocast"],
            message["forward_codec"],
            message["backward_codec"],
            tuple(message["codec_cuts"]),
            message["seconds"],
            message["memory"],
            tuple(message["layer_bytes"]),
        )


_FIELDS = {
    "layers",
    "cuts",
    "spans",
    "autocast",
    "forward_codec",
    "backward_codec",
    "codec_cuts",
    "seconds",
    "memory",
    "layer_bytes",
}


def _with_batch(cut: Sequence[CutValue], batch: int) -> tuple[CutValue, ...]:
    if batch < 1:
        raise ValueError(f"a batch has at least one sample; it cannot be profiled at batch size {batch}")
    dynamic = [value.shape[0] for value in cut if 0 in value.dynamic]
    if not dynamic and all(not value.shape or value.shape[0] != batch for value in cut):
        raise ValueError(f"the module's batch size is fixed; it cannot be profiled at batch size {batch}")
    return tuple(
        replace(value, shape=(batch, *value.shape[1:]))
        if 0 in value.dynamic and value.shape[0] == dynamic[0]
        else value
        for value in cut
    )


def _value_to_json(value: CutValue) -> dict[str, Any]:
    return {
        "name": value.name,
        "shape": list(value.shape),
        "dtype": _DTYPE_NAMES[value.dtype],
        "dynamic": list(value.dynamic),
        "differentiable": value.differentiable,
    }


def _value_from_json(data: Any) -> CutValue:
    keys = {"name", "shape", "dtype", "dynamic", "differentiable"}
    _expect(isinstance(data, dict) and set(data) == keys, f"a cut's value must have the fields {sorted(keys)}")
    _expect(type(data["name"]) is str and type(data["differentiable"]) is bool, "a cut's value has a wrong type")
    _expect(type(data["dtype"]) is str and data["dtype"] in DTYPES, "a cut's value has an unknown dtype")
    for name in ("shape", "dynamic"):
        _expect(isinstance(data[name], list) and all(_is_count(size) for size in data[name]), f"{name} must be sizes")
    _expect(all(dim < len(data["shape"]) for dim in data["dynamic"]), "a dynamic dimension is out of range")
    return CutValue(
        data["name"], tuple(data["shape"]), DTYPES[data["dtype"]], tuple(data["dynamic"]), data["differentiable"]
    )


def _check(request: ProfileRequest) -> None:
    layers, cuts = request.layers, request.cuts
    _expect(0 < len(layers) <= MAX_LAYERS, f"it must have 1 to {MAX_LAYERS} layers, not {len(layers)}")
    _expect(len(cuts) == len(layers) + 1, f"{len(layers)} layers have {len(layers) + 1} cuts, not {len(cuts)}")
    for program, before, after in zip(layers, cuts[:-1], cuts[1:], strict=True):
        fits = len(program.train.inputs) == len(before) and len(program.train.outputs) == len(after)
        _expect(fits, f"the layer {', '.join(program.layers)} does not take and give what crosses its cuts")
    for value in (value for cut in cuts for value in cut):
        _expect(_size(value.shape, value.dtype) <= _MAX_BYTES, f"the value {value.name!r} is too large")
    for program in layers:
        for name, info in program.parameters.items():
            _expect(_size(info.shape, info.dtype) <= _MAX_BYTES, f"the parameter {name!r} is too large")
        for kind, infos in (("buffer", program.buffers), ("const", program.constant_infos)):
            for name, stored in infos.items():
                tensor = request.tensors.get(f"{kind}/{name}")
                fits = tensor is not None and tuple(tensor.shape) == stored.shape and tensor.dtype == stored.dtype
                _expect(fits, f"the tensor {kind}/{name} is missing or has another shape or dtype")
    _expect(len(request.spans) <= MAX_SPANS, f"it asks for more than {MAX_SPANS} sub-models")
    for first, stop in request.spans:
        _expect(_is_count(first) and _is_count(stop), "a span must be two numbers")
        _expect(first < stop <= len(layers), f"there is no sub-model {first} to {stop} of {len(layers)} layers")
    _expect(request.autocast is None or request.autocast in _AUTOCAST, f"autocast must be one of {_AUTOCAST} or None")
    _check_codecs(request)
    _expect(
        _is_number(request.seconds) and 0 < request.seconds <= MAX_SECONDS,
        f"seconds must be above 0 and at most {MAX_SECONDS:g}",
    )
    _expect(request.memory is None or (_is_number(request.memory) and request.memory >= 0), "memory must be bytes")
    sizes = request.layer_bytes
    _expect(len(sizes) in (0, len(layers)) and all(map(_is_count, sizes)), "layer_bytes must be one size per layer")


def _check_codecs(request: ProfileRequest) -> None:
    for config in (request.forward_codec, request.backward_codec):
        _expect(config is None or isinstance(config, dict), "a codec's configuration must be an object")
        if config is not None:
            codec_from_config(config)
    cuts = request.codec_cuts
    _expect(all(_is_count(cut) and cut < len(request.cuts) for cut in cuts), f"there are {len(request.cuts)} cuts")
    _expect(len(set(cuts)) == len(cuts), "a codec's cut appears twice")
    both = request.forward_codec is not None and request.backward_codec is not None
    _expect(both or not cuts, "codec_cuts need both codecs")


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"not a valid profile request: {problem}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
