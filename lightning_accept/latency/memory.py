"""How much memory a device has, and whether an error means that it was not enough."""

from __future__ import annotations

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator and cuDNN raise plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)
