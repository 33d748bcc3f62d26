"""Memory of the device, and errors that say there is too little."""

from __future__ import annotations

import pytest
import torch

from lightning_accept.latency.memory import is_out_of_memory, memory_bytes


def test_memory_of_this_machine() -> None:
    free, total = memory_bytes(torch.device("cpu"))
    assert (free is None) == (total is None)
    assert free is None or total is None or 0 < free <= total


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("cannot allocate"), False),
    ],
)
def test_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_real_one() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**55)
    assert is_out_of_memory(error.value)
