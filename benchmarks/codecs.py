"""Time of the codecs over a memory copy of the same tensor.

    python benchmarks/codecs.py [--quick] [--json FILE]

The copy is ``torch.Tensor.copy_`` of the float32 tensor into one allocated before. Copy and codec alternate within the
same run, all on one thread; ``encode`` and ``decode`` are best time over best time of the copy, ``..._median`` the
median of the pairwise ratios. Time is the thread's CPU time for the large tensors, so that other processes on the
machine do not count, and wall-clock time for the small one, where reading the CPU clock would weigh too much. Encoding
includes everything from tensor to payload, decoding everything back. ``bytes`` is the payload's share of the tensor,
``error`` the relative squared error. Values are normally distributed.

Other packages (hivemind, bitsandbytes, zstandard, blosc2) are measured in the same way where they can be imported, and
so is our own fallback on torch.
"""

from __future__ import annotations

import argparse
import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", NUMBA_NUM_THREADS="1")

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from unittest import mock

import numpy as np
import torch
from report import Report
from torch import Tensor

from lightning_accept.codecs import Codec, MultiBit, StochasticUniform, backend, decode, reference, warm_up

LARGE = [(128, 16, 32, 32), (128, 96, 16, 16), (128, 320, 4, 4)]
SMALL = (16, 32)
TARGETS = {
    "encode multibit signed 2": 6.0,
    "encode multibit free 2": 6.0,
    "encode multibit signed 4": 14.0,
    "encode multibit free 4": 14.0,
    "decode multibit signed 2": 2.5,
    "decode multibit free 2": 2.5,
    "decode multibit signed 4": 2.5,
    "decode multibit free 4": 2.5,
    "decode stochastic 8": 2.5,
    "decode stochastic 4": 2.5,
    "encode stochastic 8": 3.5,
    "encode stochastic 4": 3.5,
    "encode stochastic 8 block 128": 6.0,
    "encode stochastic 4 block 128": 6.0,
}
"""Largest ratio allowed on each of the large tensors."""
SMALL_ENCODE_MICROSECONDS = 40.0


@dataclass(frozen=True)
class Subject:
    """Something that encodes a tensor and decodes the result. ``decode`` is None where that does not work here."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor] | None
    nbytes: Callable[[Any], int]


def ours(name: str, codec: Codec) -> Subject:
    """One of our codecs."""
    return Subject(name, codec.encode, decode, lambda payload: payload.nbytes)


def subjects() -> list[Subject]:
    """Our codecs."""
    found = [ours(f"multibit {kind} {bits}", MultiBit(bits, kind)) for kind in ("signed", "free") for bits in (2, 4)]
    found += [ours(f"stochastic {bits}", StochasticUniform(bits)) for bits in (8, 4)]
    found += [ours(f"stochastic {bits} block 128", StochasticUniform(bits, 128)) for bits in (8, 4)]
    try:
        found.append(ours("multibit free 2 zstd", MultiBit(2, "free", entropy="zstd")))
    except ImportError as error:
        print(f"left out: {error}")
    return found


def hivemind() -> list[Subject]:
    """The codecs of hivemind that quantise."""
    from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
    from hivemind.proto.runtime_pb2 import CompressionType

    def subject(name: str) -> Subject:
        kind = CompressionType.Value(name)
        return Subject(
            f"hivemind {name}",
            lambda x: serialize_torch_tensor(x, kind),
            deserialize_torch_tensor,
            lambda message: len(message.buffer),
        )

    return [subject("UNIFORM_8BIT"), subject("QUANTILE_8BIT")]


def bitsandbytes() -> list[Subject]:
    """Blockwise quantisation to 4-bit normal floats and to 8 bits."""
    from bitsandbytes import functional

    return [
        Subject(
            "bitsandbytes nf4",
            lambda x: functional.quantize_4bit(x, quant_type="nf4"),
            lambda pair: functional.dequantize_4bit(*pair),
            lambda pair: pair[0].numel() + 4 * pair[1].absmax.numel(),
        ),
        Subject(
            "bitsandbytes blockwise 8",
            functional.quantize_blockwise,
            lambda pair: functional.dequantize_blockwise(*pair),
            lambda pair: pair[0].numel() + 4 * pair[1].absmax.numel(),
        ),
    ]


def zstandard() -> list[Subject]:
    """Level 1 of zstd on the float32 values."""
    import zstandard as package

    compressor, decompressor = package.ZstdCompressor(level=1), package.ZstdDecompressor()
    return [
        Subject(
            "zstd 1 (lossless)",
            lambda x: (compressor.compress(x.numpy()), x.shape),
            lambda pair: torch.frombuffer(bytearray(decompressor.decompress(pair[0])), dtype=torch.float32).view(
                pair[1]
            ),
            lambda pair: len(pair[0]),
        )
    ]


def blosc2() -> list[Subject]:
    """The default of blosc2 on the float32 values."""
    import blosc2 as package

    package.set_nthreads(1)
    return [
        Subject(
            "blosc2 (lossless)",
            lambda x: (package.compress2(x.numpy(), typesize=4), x.shape),
            lambda pair: torch.frombuffer(bytearray(package.decompress2(pair[0])), dtype=torch.float32).view(pair[1]),
            lambda pair: len(pair[0]),
        )
    ]


def measure(x: Tensor, action: Callable[[], Any], seconds: float, least: int) -> tuple[float, float, float]:
    """Best ratio, median ratio and best time in seconds of ``action`` against a copy of ``x``."""
    clock = time.thread_time if tuple(x.shape) in LARGE else time.perf_counter
    target = torch.empty_like(x)
    times, copies = [], []
    action()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < least:
        start = clock()
        target.copy_(x)
        middle = clock()
        action()
        times.append(clock() - middle)
        copies.append(middle - start)
    ratios = [own / copy for own, copy in zip(times, copies, strict=True)]
    return min(times) / min(copies), statistics.median(ratios), min(times)


def compare(
    report: Report, table: str, subject: Subject, x: Tensor, seconds: float, least: int = 5
) -> dict[str, Any] | None:
    """One row: a subject on a tensor. None where the subject fails, which is printed."""
    row: dict[str, Any] = {"tensor": list(x.shape), "codec": subject.name}
    try:
        encoded = subject.encode(x)
        best, median, took = measure(x, lambda: subject.encode(x), seconds, least)
        row |= {"encode": best, "encode_median": median, "encode_us": took * 1e6}
        row["bytes"] = subject.nbytes(encoded) / (4 * x.numel())
    except Exception as error:
        print(f"left out: {subject.name} on {list(x.shape)}: {type(error).__name__}: {error}")
        return None
    try:
        if subject.decode is not None:
            restored = subject.decode(encoded)
            row["error"] = float((restored - x).square().sum() / x.square().sum())
            best, median, took = measure(x, lambda: subject.decode(encoded), seconds, least)
            row |= {"decode": best, "decode_median": median, "decode_us": took * 1e6}
    except Exception as error:
        print(f"left out: decoding of {subject.name}: {type(error).__name__}: {error}")
    report.row(table, **row)
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few repetitions; the figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds = 0.02 if options.quick else 1.0
    report = Report("codecs", options.quick)
    report.figure("threads", 1)
    start = time.perf_counter()
    warm_up()
    report.figure("warm_up_s", time.perf_counter() - start)
    report.figure("kernels", backend.backend().NAME)
    print("baseline: torch.Tensor.copy_ into a preallocated tensor, same run, same thread")
    tensors = [torch.randn(shape) for shape in (*LARGE, SMALL)]
    for x in tensors:
        best, _, took = measure(x, x.clone, seconds, 30)
        report.row("copy", tensor=list(x.shape), copy_us=took / best * 1e6, clone_over_copy=best)

    met: dict[str, bool] = {}
    for x in tensors:
        for subject in subjects():
            row = compare(report, "ours", subject, x, seconds, least=5 if options.quick else 50)
            for direction in ("encode", "decode"):
                name = f"{direction} {subject.name}"
                if row is not None and tuple(x.shape) in LARGE and name in TARGETS:
                    met[name] = met.get(name, True) and row[direction] <= TARGETS[name]
            if row is not None and tuple(x.shape) == SMALL and f"encode {subject.name}" in TARGETS:
                met[f"small encode {subject.name}"] = row["encode_us"] <= SMALL_ENCODE_MICROSECONDS
    for name, success in met.items():
        limit = f"{SMALL_ENCODE_MICROSECONDS:g} us" if name.startswith("small") else f"{TARGETS[name]:g} x copy"
        report.figure(f"{name} <= {limit}", success)

    peers: dict[str, str] = {}
    for package, make in (
        ("hivemind", hivemind),
        ("bitsandbytes", bitsandbytes),
        ("zstandard", zstandard),
        ("blosc2", blosc2),
    ):
        try:
            others = make()
            peers[package] = version(package)
        except Exception as error:
            print(f"left out: {package}: {type(error).__name__}: {error}")
            peers[package] = f"left out: {type(error).__name__}"
            continue
        for x in tensors:
            for subject in others:
                compare(report, "peers", subject, x, seconds)
    report.figure("peers", peers)
    with mock.patch.object(backend, "_chosen", reference):
        for x in tensors:
            for subject in subjects():
                compare(report, "fallback on torch", subject, x, seconds / 4)
    report.figure("numpy", np.__version__)
    report.finish(options.json)


if __name__ == "__main__":
    main()
