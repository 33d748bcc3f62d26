"""Messages as frames, and back. Nothing that arrives is executed, and nothing malformed gets through."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, get_args

from torch import Tensor

from lightning_accept.codecs import Payload
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.messages import Deployment, Fault, Kind, Packet, Sources, StageState
from lightning_accept.remote.frames import Buffer, WireError, load_json, pack_frame, unpack_frame

__all__ = [
    "FRAME_TYPE",
    "ITEM_HEADER",
    "PASSED_HEADER",
    "PROTOCOL",
    "WireError",
    "fault_from_json",
    "fault_to_json",
    "pack_deployment",
    "pack_packet",
    "pack_profile_request",
    "pack_state",
    "speed_from_json",
    "speed_to_json",
    "unpack_deployment",
    "unpack_packet",
    "unpack_profile_request",
    "unpack_state",
]

PROTOCOL = 4
"""Raised whenever an older peer could no longer understand a message."""

FRAME_TYPE = "application/x-safetensors"
"""Content type of a frame."""

ITEM_HEADER = "X-Accept-Item"
"""Header of a reply that holds the number of an outbox item."""

PASSED_HEADER = "X-Accept-Passed"
"""Header of a packet's reply: bytes that came in from the sender's device since the last such reply, and seconds."""

_KINDS = frozenset(get_args(Kind))
_MAX_COUNT = 2**62


def pack_packet(packet: Packet) -> bytes:
    """A packet as one frame. Part ``p`` of payload ``i`` is the tensor ``i.p``.

    Raises:
        WireError: If the metadata is not JSON (NaN and infinity are not) or a dtype cannot travel.
    """
    tensors: dict[str, Tensor] = {}
    payloads: list[dict[str, Any] | None] = []
    for index, payload in enumerate(packet.payloads):
        if payload is None:
            payloads.append(None)
            continue
        payloads.append({"meta": payload.meta, "parts": list(payload.tensors)})
        tensors.update({f"{index}.{part}": tensor for part, tensor in payload.tensors.items()})
    message = {
        "kind": packet.kind,
        "run": packet.run,
        "term": packet.term,
        "job": packet.job,
        "meta": packet.meta,
        "payloads": payloads,
    }
    return _pack("packet", message, tensors)


def unpack_packet(frame: Buffer) -> Packet:
    """The inverse of :func:`pack_packet`; a writable frame is used in place and must not be reused.

    Raises:
        WireError: If the frame is not a packet.
    """
    message, tensors = _unpack("packet", frame, own=False)
    payloads = _take(message, "payloads", list)
    packet = Packet(
        kind=_kind(message),
        run=_take(message, "run", str),
        term=_count(message, "term"),
        job=_count(message, "job"),
        meta=_take(message, "meta", dict),
        payloads=tuple(_payload(index, payload, tensors) for index, payload in enumerate(payloads)),
    )
    _nothing_left(message, tensors)
    return packet


def _kind(message: dict[str, Any]) -> Kind:
    kind: Kind = _take(message, "kind", str)
    if kind not in _KINDS:
        raise WireError(f"unknown kind of packet {kind!r}")
    return kind


def _payload(index: int, fields: Any, tensors: dict[str, Tensor]) -> Payload | None:
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise WireError(f"payload {index} is not a JSON object")
    parts = _take(fields, "parts", list)
    meta = _take(fields, "meta", dict)
    _nothing_left(fields, {})
    try:
        return Payload({part: tensors.pop(f"{index}.{part}") for part in parts}, meta)
    except (KeyError, TypeError) as error:
        raise WireError(f"payload {index} lacks one of its parts {parts}") from error


def pack_deployment(deployment: Deployment) -> bytes:
    """A deployment as one frame; its ``spec`` may hold NaN and infinity, as a program may fill with ``-inf``.

    Raises:
        WireError: If the spec is not JSON or a dtype cannot travel.
    """
    message = {name: getattr(deployment, name) for name in _DEPLOYMENT_FIELDS}
    message["sources"] = None if deployment.sources is None else asdict(deployment.sources)
    return _pack("deployment", message, deployment.tensors, non_finite=True)


_DEPLOYMENT_FIELDS = ("run", "term", "stage", "stages", "spec", "upstream", "downstream", "link_token")


def unpack_deployment(frame: Buffer) -> Deployment:
    """The inverse of :func:`pack_deployment`; every tensor has memory of its own.

    Raises:
        WireError: If the frame is not a deployment.
    """
    message, tensors = _unpack("deployment", frame, own=True, non_finite=True)
    deployment = Deployment(
        run=_take(message, "run", str),
        term=_count(message, "term"),
        stage=_count(message, "stage"),
        stages=_count(message, "stages"),
        spec=_take(message, "spec", dict),
        tensors=tensors,
        upstream=_optional_text(message, "upstream"),
        downstream=_optional_text(message, "downstream"),
        link_token=_take(message, "link_token", str),
        sources=_sources(message),
    )
    _nothing_left(message, {})
    if not 0 < deployment.stage < deployment.stages:
        raise WireError(f"a worker cannot hold stage {deployment.stage} of {deployment.stages}")
    if not deployment.link_token:
        raise WireError("the deployment has an empty link token")
    return deployment


def _sources(message: dict[str, Any]) -> Sources | None:
    if "sources" in message and message["sources"] is None:
        del message["sources"]
        return None
    fields = _take(message, "sources", dict)
    sources = Sources(term=_count(fields, "term"), names=_take(fields, "names", dict))
    _nothing_left(fields, {})
    for names in sources.names.values():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise WireError("a source's names are not a list of texts")
    return sources


def pack_state(state: StageState) -> bytes:
    """A stage's state as one frame.

    Raises:
        WireError: If the spec is not JSON or a dtype cannot travel.
    """
    return _pack("state", {"spec": state.spec}, state.tensors, non_finite=True)


def unpack_state(frame: Buffer) -> StageState:
    """The inverse of :func:`pack_state`; every tensor has memory of its own.

    Raises:
        WireError: If the frame is not a stage's state.
    """
    message, tensors = _unpack("state", frame, own=True, non_finite=True)
    state = StageState(spec=_take(message, "spec", dict), tensors=tensors)
    _nothing_left(message, {})
    return state


def pack_profile_request(request: ProfileRequest) -> bytes:
    """What is to be measured as one frame.

    Raises:
        WireError: If a dtype cannot travel.
    """
    message, tensors = request.to_message()
    return _pack("profile request", message, tensors, non_finite=True)


def unpack_profile_request(frame: Buffer) -> ProfileRequest:
    """The inverse of :func:`pack_profile_request`; every tensor has memory of its own.

    Raises:
        ValueError: If the frame is not a profile request, or one out of range.
    """
    message, tensors = _unpack("profile request", frame, own=True, non_finite=True)
    return ProfileRequest.from_message(message, tensors)


def speed_to_json(speed: Speed) -> dict[str, float]:
    """A link's speed as a JSON object."""
    return asdict(speed)


def speed_from_json(fields: Any) -> Speed:
    """The inverse of :func:`speed_to_json`.

    Raises:
        WireError: If it is not the speed of a link.
    """
    if not isinstance(fields, dict):
        raise WireError("a speed is not a JSON object")
    message = dict(fields)
    speed = Speed(bandwidth=_take(message, "bandwidth", float), latency=_take(message, "latency", float))
    _nothing_left(message, {})
    if not (0 < speed.bandwidth < math.inf and 0 <= speed.latency < math.inf):
        raise WireError(f"{speed} is not the speed of a link")
    return speed


def fault_to_json(fault: Fault) -> dict[str, Any]:
    """A fault as a JSON object."""
    return asdict(fault)


def fault_from_json(fields: Any) -> Fault:
    """The inverse of :func:`fault_to_json`.

    Raises:
        WireError: If it is not a fault.
    """
    if not isinstance(fields, dict):
        raise WireError("a fault is not a JSON object")
    message = dict(fields)
    layers = _take(message, "layers", list)
    if not all(isinstance(layer, str) for layer in layers):
        raise WireError("the layers of a fault are not names")
    texts = {name: _take(message, name, str) for name in ("where", "doing", "error", "traceback")}
    return Fault(stage=_count(message, "stage"), layers=tuple(layers), **texts)


def _pack(kind: str, message: dict[str, Any], tensors: dict[str, Tensor], *, non_finite: bool = False) -> bytes:
    try:
        text = json.dumps(message, separators=(",", ":"), allow_nan=non_finite)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the {kind} holds something that is not JSON: {error}") from error
    return pack_frame(tensors, {"lightning_accept": kind, "message": text})


def _unpack(
    kind: str, frame: Buffer, *, own: bool, non_finite: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, metadata = unpack_frame(frame, own=own)
    if metadata.get("lightning_accept") != kind:
        raise WireError(f"expected a {kind}, got a frame marked {metadata.get('lightning_accept')!r}")
    message = load_json(metadata.get("message", ""), f"{kind} message", non_finite=non_finite)
    if not isinstance(message, dict):
        raise WireError(f"the {kind} message is not a JSON object")
    return message, tensors


def _take(message: dict[str, Any], name: str, kind: type) -> Any:
    if name not in message:
        raise WireError(f"field {name!r} is missing")
    value = message.pop(name)
    if type(value) is not kind:
        raise WireError(f"field {name!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _count(message: dict[str, Any], name: str) -> int:
    value: int = _take(message, name, int)
    if not 0 <= value < _MAX_COUNT:
        raise WireError(f"field {name!r} is out of range")
    return value


def _optional_text(message: dict[str, Any], name: str) -> str | None:
    if name in message and message[name] is None:
        del message[name]
        return None
    text: str = _take(message, name, str)
    return text


def _nothing_left(message: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if message or tensors:
        raise WireError(f"unexpected {', '.join([*map(repr, message), *map(repr, tensors)])}")
