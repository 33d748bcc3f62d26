"""The network of a testbed: one namespace per host, all joined by a bridge in a namespace of its own.

Nothing of it is connected to the machine's own network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .command import Command
from .host import Host, Rates, split_rates
from .shaping import packets_as_sent, shape
from .tools import tool

_SUBNET = "10.83.0"
_DEVICE = "eth0"
_HUB = "_hub"  # no host can be called so
_RELAY = str(Path(__file__).with_name("delay.py"))


class Network:
    """The network of the testbed called ``tag``.

    Args:
        tag: What its namespaces' names begin with.
        hosts: Host number i gets the address 10.83.0.(i + 1).
        folder: For the output of the processes that delay packets.
    """

    def __init__(self, tag: str, hosts: Sequence[Host], folder: Path) -> None:
        self._tag = tag
        self._hosts = {host.name: (number, host) for number, host in enumerate(hosts)}
        self._folder = folder
        self._relays: list[Command] = []

    def build(self) -> None:
        """Make namespaces, links, addresses and routes, and shape the links."""
        hub = self._space(_HUB)
        tool("ip", "netns", "add", hub)
        tool("ip", "-n", hub, "link", "set", "lo", "up")
        tool("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        tool("ip", "-n", hub, "link", "set", "bridge", "up")
        for name, (number, host) in self._hosts.items():
            space, port = self.namespace(name), f"port{number}"
            tool("ip", "netns", "add", space)
            tool("ip", "-n", space, "link", "set", "lo", "up")
            self._connect(space, hub, port, host.delay)
            tool("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            tool("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", _DEVICE)
            tool("ip", "-n", space, "link", "set", _DEVICE, "up")
            # Bandwidth-probing congestion controls such as bbr overrun the short queue of a slow link.
            route = [f"{_SUBNET}.0/24", "dev", _DEVICE, "src", self.address(name), "congctl", "cubic"]
            tool("ip", "-n", space, "route", "replace", *route)
            packets_as_sent(space, _DEVICE)
            packets_as_sent(hub, port)
            self.set_rate(name, host.rate)

    def namespace(self, name: str) -> str:
        """The namespace of the host called ``name``."""
        return self._space(name)

    def address(self, name: str) -> str:
        """The address of the host called ``name``."""
        return f"{_SUBNET}.{self._hosts[name][0] + 1}"

    def set_rate(self, name: str, rates: Rates) -> None:
        """Shape what the host sends, at its end of the link, and what it receives, at the bridge's."""
        sending, receiving = split_rates(name, rates)
        shape(self.namespace(name), _DEVICE, sending)
        shape(self._space(_HUB), f"port{self._hosts[name][0]}", receiving)

    def _space(self, name: str) -> str:
        return f"{self._tag}.{name}"

    def _connect(self, space: str, hub: str, port: str, delay: float) -> None:
        """Lay a cable between the host and the bridge."""
        if delay == 0:
            tool("ip", "link", "add", _DEVICE, "netns", space, "type", "veth", "peer", "name", port, "netns", hub)
            return
        far = f"far-{port}"
        # It runs in the hub's namespace so that it is found there even if this process is killed.
        relay = ["ip", "netns", "exec", hub, sys.executable, "-S", _RELAY, repr(delay), port, far]
        command = Command(f"delay-{port}", relay, self._folder)
        self._relays.append(command)
        command.wait_for("^ready$", 30)
        tool("ip", "-n", hub, "link", "set", far, "netns", space)
        tool("ip", "-n", space, "link", "set", far, "name", _DEVICE)

    def end_relays(self) -> None:
        """End the processes that delay packets."""
        while self._relays:
            self._relays.pop().end(0)


def tags(prefix: str) -> set[str]:
    """Tags of testbeds whose namespaces exist."""
    return {name.split(".", 1)[0] for name in _all_namespaces() if name.startswith(prefix) and "." in name}


def processes(tag: str) -> set[int]:
    """Ids of the processes in the namespaces of a testbed."""
    found: set[int] = set()
    for name in _namespaces(tag):
        found.update(int(pid) for pid in tool("ip", "netns", "pids", name).split())
    return found


def remove(tag: str) -> None:
    """Delete the namespaces of a testbed, and with them their devices."""
    for name in _namespaces(tag):
        tool("ip", "netns", "del", name)


def _namespaces(tag: str) -> list[str]:
    return [name for name in _all_namespaces() if name.startswith(f"{tag}.")]


def _all_namespaces() -> list[str]:
    return [line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line.strip()]
