"""Conditions that make one machine behave like several: each changes how long layers take, relative to each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accept.latency import quota
from lightning_accept.latency.cores import usable_cores
from lightning_accept.latency.neighbour import neighbour

_UP_TO = {"AVX512": ("AVX2", "AVX512"), "AVX2": ("AVX2",)}
"""Instruction sets of PyTorch's own kernels that a processor with the key's runs."""


@dataclass(frozen=True)
class Condition:
    """How a process that measures is set up.

    Attributes:
        name: Unique.
        device: Where to compute.
        threads: Threads to compute with.
        onednn: Use oneDNN; without it PyTorch's own kernels compute.
        onednn_isa: Widest instruction set that oneDNN may use (``sse41``, ``avx2``, ...), or None for all.
        native_isa: Instruction set of PyTorch's own kernels (``default``, ``avx2``, ...), or None for the widest.
        autocast: Name of the autocast dtype, or None.
        channels_last: Lay images out with the channels last.
        call_overhead: Seconds that each operation takes longer, as with a slow interpreter.
        fresh_memory: Return freed memory to the system at once, so that every large tensor costs page faults.
        neighbour: Another process streams memory on a core of its own.
        share: Share of the CPU's time that the process gets, 1 for one whole core.
        share_period: Seconds over which the share is accounted.
    """

    name: str
    device: str = "cpu"
    threads: int = 1
    onednn: bool = True
    onednn_isa: str | None = None
    native_isa: str | None = None
    autocast: str | None = None
    channels_last: bool = False
    call_overhead: float = 0.0
    fresh_memory: bool = False
    neighbour: bool = False
    share: float | None = None
    share_period: float = 0.005

    def describe(self) -> dict[str, Any]:
        """The threads, and whatever is not as usual."""
        usual = Condition(self.name, threads=self.threads)
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(usual, field.name)]
        return {name: getattr(self, name) for name in ("threads", *names)}

    def environment(self) -> dict[str, str]:
        """Environment variables that the process must be started with."""
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        if self.onednn_isa is not None:
            variables["ONEDNN_MAX_CPU_ISA"] = self.onednn_isa
        if self.native_isa is not None:
            variables["ATEN_CPU_CAPABILITY"] = self.native_isa
        if self.fresh_memory:
            # glibc: every block of 64 KiB and more is mapped on its own.
            variables["MALLOC_MMAP_THRESHOLD_"] = "65536"
        return variables

    def unavailable(self) -> str | None:
        """Why this machine cannot be put in this condition, or None if it can."""
        if self.device != "cpu":
            return None if torch.cuda.is_available() else "PyTorch finds no CUDA device"
        reason = self._missing_kernels()
        if reason is not None:
            return reason
        if self.share is not None:
            return quota.unavailable()
        cores, wanted = usable_cores(), self.threads + self.neighbour
        if wanted > cores:
            return f"it takes {wanted} cores and this process may use {cores}"
        return None

    def _missing_kernels(self) -> str | None:
        widest = torch.backends.cpu.get_cpu_capability()
        if self.native_isa is not None and self.native_isa.upper() not in (*_UP_TO.get(widest, ()), "DEFAULT"):
            return f"PyTorch's kernels on this machine are {widest}"
        if self.onednn_isa is None and self.autocast is None:
            return None
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this build of PyTorch has no oneDNN"
        if self.onednn_isa is not None and widest not in _UP_TO:
            return "its processor has none of oneDNN's x86 instruction sets"
        if self.onednn_isa == "avx512_core" and widest != "AVX512":
            return "its processor has no AVX-512"
        return None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put this process in the condition, as far as :meth:`environment` has not; for the whole of its life."""
        with ExitStack() as stack:
            torch.set_num_threads(self.threads)
            torch.backends.mkldnn.enabled = self.onednn  # type: ignore[assignment]
            if self.neighbour:
                stack.enter_context(neighbour())
            if self.share is not None:
                stack.enter_context(quota.limited(self.share, self.share_period))
            if self.call_overhead:
                stack.enter_context(_Overhead(self.call_overhead))
            yield


class _Overhead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every operation begin later."""

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds = seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return func(*args, **(kwargs or {}))


CONDITIONS: tuple[Condition, ...] = (
    Condition("plain"),
    Condition("channels last", channels_last=True),
    Condition("avx2", onednn_isa="avx2", native_isa="avx2"),
    Condition("avx2, channels last", onednn_isa="avx2", native_isa="avx2", channels_last=True),
    Condition("sse4.1", onednn_isa="sse41", native_isa="default"),
    Condition("sse4.1, channels last", onednn_isa="sse41", native_isa="default", channels_last=True),
    Condition("sse4.1 in oneDNN", onednn_isa="sse41"),
    Condition("scalar kernels", native_isa="default"),
    Condition("scalar kernels, channels last", native_isa="default", channels_last=True),
    Condition("fresh memory", fresh_memory=True),
    Condition("fresh memory, channels last", fresh_memory=True, channels_last=True),
    Condition("fresh memory, avx2", fresh_memory=True, onednn_isa="avx2", native_isa="avx2"),
    Condition("fresh memory, sse4.1", fresh_memory=True, onednn_isa="sse41", native_isa="default"),
    Condition("slow calls", call_overhead=1e-4),
    Condition("slower calls", call_overhead=5e-4),
    Condition("slow calls, channels last", call_overhead=2e-4, channels_last=True),
    Condition("slow calls, avx2", call_overhead=2e-4, onednn_isa="avx2", native_isa="avx2"),
    Condition("slow calls, sse4.1", call_overhead=1e-3, onednn_isa="sse41", native_isa="default"),
    Condition("slow calls, fresh memory", call_overhead=2e-4, fresh_memory=True),
    Condition("bfloat16", autocast="bfloat16"),
    Condition("bfloat16, channels last", autocast="bfloat16", channels_last=True),
    Condition("bfloat16, avx512", autocast="bfloat16", onednn_isa="avx512_core"),
    Condition("bfloat16, avx512, channels last", autocast="bfloat16", onednn_isa="avx512_core", channels_last=True),
    Condition("bfloat16, fresh memory", autocast="bfloat16", fresh_memory=True),
    Condition("half a core", share=0.5),
    Condition("third of a core, channels last", share=0.34, channels_last=True),
    Condition("half a core, sse4.1", share=0.5, onednn_isa="sse41", native_isa="default"),
    Condition("busy memory", neighbour=True),
    Condition("busy memory, channels last", neighbour=True, channels_last=True),
    Condition("busy memory, sse4.1", neighbour=True, onednn_isa="sse41", native_isa="default"),
    Condition("without oneDNN", onednn=False),
    Condition("cuda", device="cuda:0"),
    Condition("cuda, channels last", device="cuda:0", channels_last=True),
    Condition("cuda, bfloat16", device="cuda:0", autocast="bfloat16"),
)


def choose_conditions(names: Iterable[str] | None, threads: Sequence[int] = (1,)) -> list[Condition]:
    """Conditions by name, each with each number of threads.

    Args:
        names: Names among :data:`CONDITIONS`; None for all.
        threads: Numbers of threads.

    Raises:
        ValueError: If there is no such condition; lists those that there are.
    """
    known = {condition.name: condition for condition in CONDITIONS}
    chosen = []
    for name in known if names is None else dict.fromkeys(names):
        if name not in known:
            raise ValueError(f"there is no condition {name!r}; choose among {', '.join(map(repr, known))}")
        for count in dict.fromkeys(threads):
            title = name if count == 1 else f"{name}, {count} threads"
            chosen.append(replace(known[name], name=title, threads=count))
    return chosen
