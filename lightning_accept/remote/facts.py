"""What a worker tells about itself: device, threads, memory, addresses."""

from __future__ import annotations

import platform
import socket
from typing import Any

import torch

from lightning_accept.latency.memory import memory_bytes
from lightning_accept.remote.cores import cpu_share
from lightning_accept.remote.wire import PROTOCOL
from lightning_accept.version import __version__


def choose_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is the first CUDA device if there is one, else the CPU.

    Raises:
        ValueError: If there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; choose cpu, cuda:0 or auto") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} is not available: this machine shows {torch.cuda.device_count()} CUDA devices to torch"
            f" {torch.__version__}; choose cpu or auto"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; choose cpu, cuda:0 or auto")
    return device


def facts(device: torch.device, threads: int) -> dict[str, Any]:
    """JSON-able facts of this device; memory in bytes, ``cores`` as what may be kept busy."""
    free, total = memory_bytes(device)
    return {
        "version": __version__,
        "protocol": PROTOCOL,
        "device": str(device),
        "threads": threads,
        "cores": cpu_share(),
        "memory_free": free,
        "memory_total": total,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
    }


def outgoing_address() -> str:
    """The address under which other machines most likely reach this one; no packet is sent to find it."""
    # Connecting a UDP socket only picks a route. 192.0.2.1 is reserved for documentation (RFC 5737).
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def reachable_addresses(host: str) -> list[str]:
    """The addresses of a server bound to ``host``, the most useful one for other machines first."""
    if host not in ("", "0.0.0.0", "::"):
        return [host]
    addresses = [outgoing_address()]
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, address in found:
        if family == socket.AF_INET or (host == "::" and family == socket.AF_INET6):
            addresses.append(str(address[0]))
    addresses.append("127.0.0.1")
    return list(dict.fromkeys(addresses))


def url(address: str, port: int, *, tls: bool) -> str:
    """``address`` and ``port`` as the URL that a central node is given."""
    host = f"[{address}]" if ":" in address else address
    return f"{'https' if tls else 'http'}://{host}:{port}"
