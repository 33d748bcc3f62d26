"""The process that streams memory."""

from __future__ import annotations

import os

import pytest

from lightning_accept.latency.neighbour import neighbour


def test_it_lives_as_long_as_the_block() -> None:
    with pytest.raises(RuntimeError, match="over"), neighbour() as pid:
        os.kill(pid, 0)
        raise RuntimeError("over")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
