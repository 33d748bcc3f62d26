"""Messages survive the wire, and what is not a message does not get through."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_accept.codecs import Payload
from lightning_accept.partition.link import Speed
from lightning_accept.pipeline.messages import Deployment, Fault, Packet, Sources, StageState
from lightning_accept.remote.frames import pack_frame, unpack_frame
from lightning_accept.remote.wire import (
    WireError,
    fault_from_json,
    fault_to_json,
    pack_deployment,
    pack_packet,
    pack_state,
    speed_from_json,
    speed_to_json,
    unpack_deployment,
    unpack_packet,
    unpack_state,
)


def test_a_packet_returns_as_it_was() -> None:
    payload = Payload(
        {"data": torch.tensor([1, 2], dtype=torch.int8), "a.b": torch.tensor(1.0), "": torch.empty(0)},
        {"codec": "multibit", "shape": [1, 2], "nested": {"ü": None}},
    )
    other = Payload({"data": torch.tensor([True, False])}, {"codec": "raw"})
    packet = Packet("backward", "run", 3, 41, {"batch": 4, "lr": 0.1, "flag": True}, (payload, None, other))
    back = unpack_packet(pack_packet(packet))
    assert dataclasses.replace(back, payloads=()) == dataclasses.replace(packet, payloads=())
    assert back.payloads[1] is None
    for one, two in zip(back.payloads, packet.payloads, strict=True):
        if one is not None and two is not None:
            assert one.meta == two.meta
            assert list(one.tensors) == list(two.tensors)
            assert all(torch.equal(one.tensors[part], two.tensors[part]) for part in two.tensors)
            assert all(one.tensors[part].dtype == two.tensors[part].dtype for part in two.tensors)


@pytest.mark.parametrize("kind", ["forward", "backward", "flush", "step", "evaluate"])
def test_every_kind_travels_without_payloads(kind: Any) -> None:
    packet = Packet(kind, "run", 0, 0)
    assert unpack_packet(pack_packet(packet)) == packet


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {1, 2}, torch.tensor(1.0)])
def test_metadata_that_is_not_json_is_refused_where_it_is_packed(value: Any) -> None:
    with pytest.raises(WireError, match="the packet holds something that is not JSON"):
        pack_packet(Packet("forward", "run", 1, 0, {"value": value}))


def test_a_deployment_returns_as_it_was(deployment: Callable[..., Deployment]) -> None:
    sent = deployment(spec={"fill": -math.inf, "list": [1, "a"]}, upstream="http://a:1", stage=2, stages=3)
    back = unpack_deployment(pack_deployment(sent))
    assert dataclasses.replace(back, tensors={}) == dataclasses.replace(sent, tensors={})
    assert torch.equal(back.tensors["weight"], sent.tensors["weight"])


def test_where_layers_are_to_be_found_travels_too(deployment: Callable[..., Deployment]) -> None:
    sources = Sources(3, {"": ["param/a"], "http://a:1": ["buffer/b", "const/c"]})
    assert unpack_deployment(pack_deployment(deployment(sources=sources))).sources == sources
    for wrong in (Sources(-1, {}), Sources(1, {"": "param/a"}), Sources(1, {"": [1]}), Sources(1, [])):  # type: ignore[arg-type, dict-item, list-item]
        with pytest.raises(WireError):
            unpack_deployment(pack_deployment(deployment(sources=wrong)))


def test_a_state_returns_as_it_was() -> None:
    back = unpack_state(pack_state(StageState({"step": 3}, {"w": torch.ones(2, dtype=torch.bfloat16)})))
    assert back.spec == {"step": 3}
    assert back.tensors["w"].dtype == torch.bfloat16


def test_deployed_tensors_own_their_memory(deployment: Callable[..., Deployment]) -> None:
    tensors = {"a": torch.zeros(16), "b": torch.zeros(16)}
    back = unpack_deployment(bytearray(pack_deployment(deployment(tensors=tensors))))
    assert all(tensor.untyped_storage().nbytes() == 64 for tensor in back.tensors.values())


def changed(message: dict[str, Any], **changes: Any) -> bytes:
    text = json.dumps({key: value for key, value in {**message, **changes}.items() if value is not ...})
    return pack_frame({"0.data": torch.zeros(2)}, {"lightning_accept": "packet", "message": text})


PACKET: dict[str, Any] = {
    "kind": "forward",
    "run": "r",
    "term": 1,
    "job": 0,
    "meta": {},
    "payloads": [{"meta": {}, "parts": ["data"]}],
}


def test_the_message_below_is_well_formed() -> None:
    assert unpack_packet(changed(PACKET)).payloads[0] is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "exec"},
        {"kind": 3},
        {"kind": ...},
        {"run": 5},
        {"run": None},
        {"term": -1},
        {"term": 1.0},
        {"term": True},
        {"term": "1"},
        {"job": 2**70},
        {"job": ...},
        {"meta": []},
        {"meta": {"x": math.nan}},
        {"meta": {"x": math.inf}},
        {"payloads": {}},
        {"payloads": []},
        {"payloads": [None]},
        {"payloads": ["data"]},
        {"payloads": [{"meta": {}, "parts": ["data", "more"]}]},
        {"payloads": [{"meta": {}, "parts": ["data", "data"]}]},
        {"payloads": [{"meta": {}, "parts": [["data"]]}]},
        {"payloads": [{"meta": 1, "parts": ["data"]}]},
        {"payloads": [{"parts": ["data"]}]},
        {"payloads": [{"meta": {}, "parts": ["data"], "code": "x"}]},
        {"surprise": 1},
    ],
)
def test_malformed_packets_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        unpack_packet(changed(PACKET, **changes))


@pytest.mark.parametrize(
    "metadata", [{}, {"lightning_accept": "packet"}, {"lightning_accept": "packet", "message": "1"}]
)
def test_other_safetensors_are_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(WireError):
        unpack_packet(pack_frame({}, metadata))


def test_one_kind_of_message_is_not_taken_for_another(deployment: Callable[..., Deployment]) -> None:
    with pytest.raises(WireError, match="expected a packet, got a frame marked 'deployment'"):
        unpack_packet(pack_deployment(deployment()))
    with pytest.raises(WireError):
        unpack_state(pack_packet(Packet("flush", "r", 0, 0)))


@pytest.mark.parametrize(
    "changes",
    [{"stage": 0}, {"stage": 2}, {"upstream": 5}, {"link_token": ""}, {"link_token": None}, {"spec": []}, {"run": ...}],
)
def test_malformed_deployments_are_refused(deployment: Callable[..., Deployment], changes: dict[str, Any]) -> None:
    tensors, metadata = unpack_frame(pack_deployment(deployment()))
    message = {key: value for key, value in {**json.loads(metadata["message"]), **changes}.items() if value is not ...}
    with pytest.raises(WireError):
        unpack_deployment(pack_frame(tensors, {**metadata, "message": json.dumps(message)}))


def test_a_fault_returns_as_it_was() -> None:
    fault = Fault(2, ("a", "b"), "http://w", "forward of batch 7", "ValueError: no", "Traceback ...")
    assert fault_from_json(json.loads(json.dumps(fault_to_json(fault)))) == fault


@pytest.mark.parametrize("fields", [None, [], {}, {"stage": 1}, {"layers": [1]}])
def test_malformed_faults_are_refused(fields: Any) -> None:
    with pytest.raises(WireError):
        fault_from_json(fields)


def test_a_speed_returns_as_it_was() -> None:
    assert speed_from_json(speed_to_json(Speed(1.5e6, 0.25))) == Speed(1.5e6, 0.25)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"bandwidth": 1.0},
        {"bandwidth": "1", "latency": 0.0},
        {"bandwidth": 0.0, "latency": 0.0},
        {"bandwidth": math.inf, "latency": 0.0},
        {"bandwidth": 1.0, "latency": -1.0},
        {"bandwidth": 1.0, "latency": math.nan},
        {"bandwidth": 1.0, "latency": 0.0, "more": 1},
    ],
)
def test_malformed_speeds_are_refused(fields: Any) -> None:
    with pytest.raises(WireError):
        speed_from_json(fields)
