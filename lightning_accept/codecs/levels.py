"""The levels of multi-bit quantisation: thresholds, updates and initialisation.

The first four functions are written for two readers: :mod:`~lightning_accept.codecs.kernels` compiles them with numba,
the torch implementation calls them as they stand. Each therefore stands alone and keeps to what numba understands.

A *code* is the number whose bit i says which sign ``a[i]`` takes (``signed``), or the index of the level (``free``).
Levels are ranked in ascending order; ``codes[rank]`` is the code of a rank. The code of an element is found without a
table: starting from ``codes[0]``, every threshold at or below the element flips the bits in its ``delta``.
"""

from __future__ import annotations

import functools
import heapq
import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

SAMPLE = 65536
"""Most elements on which free levels are initialised."""

_RIDGE = 1e-9
_LLOYD_ROUNDS = 50


def signed_order(a: F64) -> tuple[F32, U8, U8]:
    """Thresholds, deltas and codes of the ``2**k`` signed sums of ``a`` [k].

    Thresholds are the midpoints of neighbouring levels, so that each element takes the nearest level (AccEPT,
    arXiv 2311.05827, section on multi-bit quantisation). They are padded with infinity to a multiple of three, which
    the kernels take in one go.
    """
    bits = a.shape[0]
    count = 1 << bits
    values = np.zeros(count, np.float64)
    for code in range(count):
        total = 0.0
        for i in range(bits):
            total += a[i] if (code >> i) & 1 else -a[i]
        values[code] = total
    # A stable insertion sort: the order of equal levels is part of what both implementations must agree on.
    order = np.arange(count)
    for i in range(1, count):
        code = order[i]
        j = i
        while j > 0 and values[order[j - 1]] > values[code]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = code
    padded = (count + 1) // 3 * 3
    thresholds = np.full(padded, np.inf, np.float32)
    deltas = np.zeros(padded, np.uint8)
    codes = np.zeros(count, np.uint8)
    codes[0] = order[0]
    for rank in range(1, count):
        codes[rank] = order[rank]
        thresholds[rank - 1] = 0.5 * (values[order[rank - 1]] + values[order[rank]])
        deltas[rank - 1] = order[rank - 1] ^ order[rank]
    return thresholds, deltas, codes


def free_order(levels: F64) -> tuple[F32, U8, U8]:
    """Thresholds, deltas and codes of ascending free ``levels`` [2**k]; the codes are the ranks."""
    count = levels.shape[0]
    padded = (count + 1) // 3 * 3
    thresholds = np.full(padded, np.inf, np.float32)
    deltas = np.zeros(padded, np.uint8)
    codes = np.zeros(count, np.uint8)
    for rank in range(1, count):
        codes[rank] = rank
        thresholds[rank - 1] = 0.5 * (levels[rank - 1] + levels[rank])
        deltas[rank - 1] = (rank - 1) ^ rank
    return thresholds, deltas, codes


def signed_update(bits: int, codes: U8, counts: F64, sums: F64, sum_squares: float) -> tuple[F64, float, float]:
    """``a = (B'B)^-1 B'x``, the bias ``m = mean(B a - x)`` and the squared error ``|x - B a + m|^2``.

    Everything follows from how many elements each rank holds (``counts``) and their sums (``sums``), so the tensor is
    not read a second time. The ridge only matters where ``B'B`` is singular (constant tensors).
    """
    count = codes.shape[0]
    gram = np.zeros((bits, bits), np.float64)
    a = np.zeros(bits, np.float64)
    total = 0.0
    mean = 0.0
    for rank in range(count):
        total += counts[rank]
        mean += sums[rank]
        for i in range(bits):
            sign_i = 1.0 if (codes[rank] >> i) & 1 else -1.0
            a[i] += sign_i * sums[rank]
            for j in range(i + 1):
                sign_j = 1.0 if (codes[rank] >> j) & 1 else -1.0
                gram[i, j] += sign_i * sign_j * counts[rank]
    mean /= total
    # Cholesky in place: gram becomes its lower factor, a the solution.
    for i in range(bits):
        gram[i, i] += _RIDGE * total
        for j in range(i + 1):
            value = gram[i, j]
            for p in range(j):
                value -= gram[i, p] * gram[j, p]
            gram[i, j] = math.sqrt(value) if i == j else value / gram[j, j]
    for i in range(bits):
        for p in range(i):
            a[i] -= gram[i, p] * a[p]
        a[i] /= gram[i, i]
    for i in range(bits - 1, -1, -1):
        for p in range(i + 1, bits):
            a[i] -= gram[p, i] * a[p]
        a[i] /= gram[i, i]
    bias = -mean
    error = sum_squares
    for rank in range(count):
        value = 0.0
        for i in range(bits):
            value += a[i] if (codes[rank] >> i) & 1 else -a[i]
        bias += value * counts[rank] / total
        error += value * (value * counts[rank] - 2.0 * sums[rank])
    return a, bias, max(0.0, error - total * bias * bias)


def free_update(levels: F64, counts: F64, sums: F64, sum_squares: float) -> tuple[F64, float]:
    """One step of Lloyd's algorithm: new levels and the squared error.

    Each level becomes the mean of its elements, an empty one keeps its value. The mean is kept between the neighbouring
    thresholds, where only rounding could take it out, so levels stay in ascending order.
    """
    count = levels.shape[0]
    updated = levels.copy()
    error = sum_squares
    for rank in range(count):
        if counts[rank] == 0.0:
            continue
        value = sums[rank] / counts[rank]
        if rank > 0:
            value = max(value, 0.5 * (levels[rank - 1] + levels[rank]))
        if rank < count - 1:
            value = min(value, 0.5 * (levels[rank] + levels[rank + 1]))
        updated[rank] = value
        error += value * (value * counts[rank] - 2.0 * sums[rank])
    return updated, max(0.0, error)


def signed_table(a: F32, bias: float) -> F32:
    """What each code decodes to: the signed sum of ``a`` [k] minus ``bias``."""
    table: F64 = (_signs(len(a)) * a).sum(1) - bias
    return table.astype(np.float32)


@functools.cache
def _signs(bits: int) -> F64:
    """The signs that each code stands for, [2**bits, bits]."""
    set_bits = (np.arange(1 << bits)[:, None] >> np.arange(bits)) & 1
    return np.where(set_bits, 1.0, -1.0)


def initial_free_levels(values: F32, count: int) -> F64:
    """Ascending levels [count] by k-means on at most :data:`SAMPLE` of ``values`` [n], n at least 1.

    Lloyd's algorithm finds a local optimum, so it starts three times: from splitting the worst cell again and again,
    from equal shares of the elements, and from shares of the cube root of the density, which is best for many levels
    (Panter and Dite, 1951).
    """
    ordered = np.sort(values[_spread(len(values), min(len(values), SAMPLE))].astype(np.float64))
    low, high = float(ordered[0]), float(ordered[-1])
    if low == high:
        return np.full(count, low)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    shares = (np.arange(count) + 0.5) / count
    histogram, edges = np.histogram(ordered, bins=1024, range=(low, high))
    mass = np.concatenate(([0.0], np.cumsum(np.cbrt(histogram))))
    starts = (
        _split(ordered, sums, count),
        ordered[(shares * len(ordered)).astype(np.int64)],
        np.interp(shares * mass[-1], mass, edges),
    )
    best, best_gain = starts[0], -math.inf
    for start in starts:
        levels, gain = _lloyd(ordered, sums, start)
        if gain > best_gain:
            best, best_gain = levels, gain
    return best


def _split(ordered: F64, sums: F64, count: int) -> F64:
    """Means of ``count`` cells: again and again, the cell with the largest squared error is split at its mean."""
    squares = np.concatenate(([0.0], np.cumsum(ordered * ordered)))

    def cell(first: int, last: int) -> tuple[float, int, int]:
        total = sums[last] - sums[first]
        return -(squares[last] - squares[first] - total * total / (last - first)), first, last

    cells = [cell(0, len(ordered))]
    while len(cells) < count:
        _, first, last = cells[0]
        middle = int(np.searchsorted(ordered, (sums[last] - sums[first]) / (last - first)))
        if not first < middle < last:
            break
        heapq.heapreplace(cells, cell(first, middle))
        heapq.heappush(cells, cell(middle, last))
    means = sorted(float((sums[last] - sums[first]) / (last - first)) for _, first, last in cells)
    return np.array(means + means[-1:] * (count - len(means)))


def _lloyd(ordered: F64, sums: F64, levels: F64) -> tuple[F64, float]:
    """K-means on sorted values with their running ``sums``; the gain is what the levels take off the sum of squares."""
    gain = -math.inf
    for _ in range(_LLOYD_ROUNDS):
        edges = np.searchsorted(ordered, 0.5 * (levels[1:] + levels[:-1]))
        edges = np.concatenate(([0], edges, [len(ordered)]))
        counts = np.diff(edges)
        totals = np.diff(sums[edges])
        levels = np.where(counts > 0, totals / np.maximum(counts, 1), levels)
        last, gain = gain, float((levels * (2.0 * totals - counts * levels)).sum())
        if gain <= last * (1 + 1e-6):
            break
    return levels, gain


def _spread(length: int, count: int) -> NDArray[np.int64]:
    """``count`` distinct indices below ``length``, spread evenly and in step with no image row or channel."""
    if count == length:
        return np.arange(length)
    step = int(length * 0.6180339887498949) | 1
    while math.gcd(step, length) != 1:
        step += 2
    return np.arange(count) * step % length
