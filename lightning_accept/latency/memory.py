"""How much memory a device has, and whether an error means that it was not enough."""

from __future__ import annotations

import os

import torch

_SIGNS = ("allocate", "out of memory", "alloc_failed", "not enough memory")


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


def process_bytes(device: torch.device) -> int | None:
    """Bytes of memory that this process occupies on ``device``; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator and cuDNN raise plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)
