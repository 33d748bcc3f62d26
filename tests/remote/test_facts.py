"""What a worker tells about itself."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from lightning_accept.remote import facts as module
from lightning_accept.remote.facts import choose_device, facts, outgoing_address, reachable_addresses, url


def test_facts_are_json_and_plausible() -> None:
    found = json.loads(json.dumps(facts(torch.device("cpu"), 2)))
    assert found["device"] == "cpu"
    assert found["threads"] == 2
    assert found["memory_total"] is None or found["memory_total"] >= found["memory_free"] > 2**20
    assert found["cores"] > 0


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="there is no device 'gpu'; choose cpu, cuda:0 or auto"):
        choose_device("gpu")
    with pytest.raises(ValueError, match="'meta' is not supported"):
        choose_device("meta")
    with pytest.raises(ValueError, match=r"'cuda:99' is not available: this machine shows \d+ CUDA devices"):
        choose_device("cuda:99")


def test_an_address_is_found() -> None:
    socket.inet_aton(outgoing_address())


def test_without_a_route_the_host_name_and_then_the_loopback_help(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("network is unreachable")

    monkeypatch.setattr(module.socket, "socket", NoRoute)
    monkeypatch.setattr(module.socket, "gethostbyname", lambda name: "198.51.100.7")
    assert outgoing_address() == "198.51.100.7"

    def unknown(name: str) -> str:
        raise OSError("unknown host")

    monkeypatch.setattr(module.socket, "gethostbyname", unknown)
    assert outgoing_address() == "127.0.0.1"


def test_a_wildcard_stands_for_every_address_and_others_for_themselves() -> None:
    assert reachable_addresses("192.0.2.7") == ["192.0.2.7"]
    addresses = reachable_addresses("0.0.0.0")
    assert addresses[0] == outgoing_address()
    assert "127.0.0.1" in addresses
    assert len(addresses) == len(set(addresses))


def test_urls() -> None:
    assert url("192.0.2.7", 7070, tls=False) == "http://192.0.2.7:7070"
    assert url("::1", 1, tls=True) == "https://[::1]:1"
