"""Named conditions of one machine."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_accept.latency import conditions as module
from lightning_accept.latency.conditions import CONDITIONS, Condition, choose_conditions


def test_there_are_enough_and_no_two_alike() -> None:
    assert len({condition.name for condition in CONDITIONS}) == len(CONDITIONS)
    assert len([condition for condition in CONDITIONS if condition.device == "cpu"]) >= 24
    settings = {tuple(sorted(condition.describe().items(), key=str)) for condition in CONDITIONS}
    assert len(settings) == len(CONDITIONS)


def test_description_says_what_is_unusual() -> None:
    assert Condition("plain").describe() == {"threads": 1}
    assert Condition("x", threads=3, channels_last=True, share=0.5).describe() == {
        "threads": 3,
        "channels_last": True,
        "share": 0.5,
    }


def test_environment() -> None:
    assert Condition("plain", threads=2).environment() == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    narrow = Condition("x", onednn_isa="sse41", native_isa="default", fresh_memory=True).environment()
    assert narrow["ONEDNN_MAX_CPU_ISA"] == "sse41"
    assert narrow["ATEN_CPU_CAPABILITY"] == "default"
    assert narrow["MALLOC_MMAP_THRESHOLD_"] == "65536"


def test_choosing() -> None:
    assert [one.name for one in choose_conditions(None)] == [one.name for one in CONDITIONS]
    chosen = choose_conditions(["plain", "sse4.1", "plain"], [1, 2])
    assert [one.name for one in chosen] == ["plain", "plain, 2 threads", "sse4.1", "sse4.1, 2 threads"]
    assert [one.threads for one in chosen] == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="there is no condition 'turbo'; choose among 'plain', 'channels last'"):
        choose_conditions(["turbo"])


@pytest.mark.parametrize(
    ("condition", "widest", "reason"),
    [
        (Condition("x"), "DEFAULT", None),
        (Condition("x", native_isa="default"), "NEON", None),
        (Condition("x", native_isa="avx2"), "AVX512", None),
        (Condition("x", native_isa="avx2"), "NEON", "PyTorch's kernels on this machine are NEON"),
        (Condition("x", onednn_isa="sse41"), "AVX2", None),
        (Condition("x", onednn_isa="sse41"), "NEON", "none of oneDNN's x86 instruction sets"),
        (Condition("x", onednn_isa="avx512_core"), "AVX2", "no AVX-512"),
    ],
)
def test_available_or_why_not(
    condition: Condition, widest: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: widest)
    found = condition.unavailable()
    assert found is None if reason is None else reason in (found or "")


def test_cores_and_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    assert Condition("x", threads=2).unavailable() is None
    assert Condition("x", threads=2, neighbour=True).unavailable() == "it takes 3 cores and this process may use 2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Condition("x", device="cuda:0").unavailable() == "PyTorch finds no CUDA device"


def test_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mkldnn.enabled
    now = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    try:
        with Condition("x", onednn=False, call_overhead=3.0).applied():
            assert not torch.backends.mkldnn.enabled
            x = torch.ones(2)
            with monkeypatch.context() as patched:
                patched.setattr(time, "perf_counter", lambda: next(now))
                x + x
    finally:
        torch.backends.mkldnn.enabled = before
    assert next(now) == 4.0
