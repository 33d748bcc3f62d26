"""Any floating-point tensor as a float32 matrix on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Hands out tensors as float32 [n, cols]: as they are where possible, else copied to a buffer that is reused."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def load(self, tensor: Tensor) -> Tensor:
        """``tensor`` (at least one dimension and one element) as float32 [n, cols], valid until the next call."""
        source = tensor.detach()
        rows = source.shape[0]
        ready = source.dtype == torch.float32 and source.device.type == "cpu" and source.is_contiguous()
        if ready and source.data_ptr() % 4 == 0:
            return source.view(rows, -1)
        if self._buffer.numel() < source.numel():
            self._buffer = torch.empty(source.numel())
        values = self._buffer[: source.numel()].view(source.shape)
        return values.copy_(source).view(rows, -1)
