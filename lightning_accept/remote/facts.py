"""What a worker tells about itself: device, threads, memory, addresses."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import torch

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


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Free and total memory of ``device`` in bytes; None where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        return None, None


def facts(device: torch.device, threads: int) -> dict[str, Any]:
    """JSON-able facts of this worker; memory in bytes."""
    free, total = memory_bytes(device)
    return {
        "version": __version__,
        "protocol": PROTOCOL,
        "device": str(device),
        "threads": threads,
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
