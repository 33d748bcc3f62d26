"""The numba kernels: serial, without the GIL, cached on disk. :mod:`~lightning_accept.codecs.fast` calls them.

What shapes them: work goes through blocks that stay in the first-level cache; inner loops are functions of their own,
over plain runs, with one operation width, because only then does LLVM vectorise them; sums are float32 over short runs,
then float64. ``reassoc`` lets LLVM reorder sums, NaN and infinity keep their meaning. Little-endian byte order is
assumed where eight bytes are handled as one word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from lightning_accept.codecs import levels as _levels

_WIDTH = 1024
_BLOCK = 8 * _WIDTH
_RUN = 2048
_FASTMATH = {"reassoc", "nsz", "contract"}

_ZERO = np.float32(0)
_ONE = np.float32(1)
_NONE = np.uint8(0)

_LOW_BITS = np.uint64(0x0101010101010101)
_GATHER = np.uint64(0x8040201008040201)
_SCATTER = np.uint64(0x0102040810204080)
_CARRY = np.uint64(0x7F7F7F7F7F7F7F7F)


def _kernel(signature: str | None = None, fastmath: Any = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once for ``signature`` (without one: when first used), cached where a directory can be written."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, nogil=True, cache=True, fastmath=fastmath, error_model="numpy")(function)
        except RuntimeError:  # "cannot cache function": neither this directory nor the user's can be written
            return numba.njit(signature, nogil=True, fastmath=fastmath, error_model="numpy")(function)

    return decorate


_ORDER = "Tuple((f4[::1], u1[::1], u1[::1]))(f8[::1])"
signed_order = _kernel(_ORDER)(_levels.signed_order)
free_order = _kernel(_ORDER)(_levels.free_order)
signed_update = _kernel("Tuple((f8[::1], f8, f8))(i8, u1[::1], f8[::1], f8[::1], f8)")(_levels.signed_update)
free_update = _kernel("Tuple((f8[::1], f8))(f8[::1], f8[::1], f8[::1], f8)")(_levels.free_update)


# Packing. ``rows``: codes [8, width], one byte per column and plane, the first row in the highest bit.
# ``run``: codes in a row, one byte per eight and plane, the first in the highest bit.


@_kernel("void(u1[::1], u1, u1, u1[::1])")
def _add_bit(code, mask, bit, out):  # type: ignore[no-untyped-def]
    for c in range(out.shape[0]):
        out[c] |= bit if (code[c] & mask) != 0 else _NONE


@_kernel()
def _pack_rows(code, bits, planes, at):  # type: ignore[no-untyped-def]
    width = code.shape[1]
    for p in range(bits):
        out = planes[p, at : at + width]
        out[:] = 0
        for r in range(8):
            _add_bit(code[r], np.uint8(1 << p), np.uint8(128 >> r), out)


@_kernel()
def _unpack_rows(planes, bits, at, code):  # type: ignore[no-untyped-def]
    width = code.shape[1]
    code[:, :] = 0
    for p in range(bits):
        source = planes[p, at : at + width]
        for r in range(8):
            _add_bit(source, np.uint8(128 >> r), np.uint8(1 << p), code[r])


@_kernel("void(u8[::1], u8, u1[::1])")
def _gather_bits(words, shift, out):  # type: ignore[no-untyped-def]
    for i in range(words.shape[0]):
        out[i] = np.uint8((((words[i] >> shift) & _LOW_BITS) * _GATHER) >> np.uint64(56))


@_kernel("void(u1[::1], u8, u8[::1])")
def _scatter_bits(source, shift, words):  # type: ignore[no-untyped-def]
    for i in range(words.shape[0]):
        spread = (np.uint64(source[i]) * _LOW_BITS) & _SCATTER
        words[i] |= (((spread + _CARRY) >> np.uint64(7)) & _LOW_BITS) << shift


@_kernel()
def _pack_run(code, bits, planes, at):  # type: ignore[no-untyped-def]
    words = code.view(np.uint64)
    for p in range(bits):
        _gather_bits(words, np.uint64(p), planes[p, at : at + words.shape[0]])


@_kernel()
def _unpack_run(planes, bits, at, code):  # type: ignore[no-untyped-def]
    words = code.view(np.uint64)
    words[:] = 0
    for p in range(bits):
        _scatter_bits(planes[p, at : at + words.shape[0]], np.uint64(p), words)


@_kernel("void(u1[:,::1], i8, b1, u1[:,::1])")
def pack_planes(codes, bits, flat, planes):  # type: ignore[no-untyped-def]
    """See :func:`lightning_accept.codecs.packing.pack_planes`."""
    n, cols = codes.shape
    run = codes.reshape(-1)
    block = np.zeros(8 if flat else 8 * cols, np.uint8)
    if flat:
        whole = run.shape[0] // 8 * 8
        _pack_run(run[:whole], bits, planes, 0)
        if whole < run.shape[0]:
            block[: run.shape[0] - whole] = run[whole:]
            _pack_run(block, bits, planes, whole // 8)
        return
    for row in range(0, n, 8):
        part = run[row * cols : min(n, row + 8) * cols]
        if row + 8 > n:
            block[: part.shape[0]] = part
            part = block
        _pack_rows(part.reshape(8, cols), bits, planes, row // 8 * cols)


@_kernel("void(u1[:,::1], i8, b1, u1[:,::1])")
def unpack_planes(planes, bits, flat, codes):  # type: ignore[no-untyped-def]
    """The inverse of :func:`pack_planes`, into ``codes``."""
    n, cols = codes.shape
    run = codes.reshape(-1)
    block = np.empty(8 if flat else 8 * cols, np.uint8)
    if flat:
        whole = run.shape[0] // 8 * 8
        _unpack_run(planes, bits, 0, run[:whole])
        if whole < run.shape[0]:
            _unpack_run(planes, bits, whole // 8, block)
            run[whole:] = block[: run.shape[0] - whole]
        return
    for row in range(0, n, 8):
        part = run[row * cols : min(n, row + 8) * cols]
        if row + 8 <= n:
            _unpack_rows(planes, bits, row // 8 * cols, part.reshape(8, cols))
        else:
            _unpack_rows(planes, bits, row // 8 * cols, block.reshape(8, cols))
            part[:] = block[: part.shape[0]]


@_kernel("void(u1[:,::1], u1[:,::1])")
def pack_nibbles(codes, packed):  # type: ignore[no-untyped-def]
    """Rows 2i and 2i+1 of ``codes`` to row i of ``packed``, the first in the high half."""
    four = np.uint8(4)
    n = codes.shape[0]
    for i in range(n // 2):
        high, low, out = codes[2 * i], codes[2 * i + 1], packed[i]
        for c in range(out.shape[0]):
            out[c] = np.uint8(high[c] << four) | low[c]
    if n % 2:
        for c in range(codes.shape[1]):
            packed[n // 2, c] = np.uint8(codes[n - 1, c] << four)


@_kernel("void(u1[:,::1], u1[:,::1])")
def unpack_nibbles(packed, codes):  # type: ignore[no-untyped-def]
    """The inverse of :func:`pack_nibbles`, into ``codes``."""
    four, mask = np.uint8(4), np.uint8(15)
    for row in range(codes.shape[0]):
        source, out = packed[row // 2], codes[row]
        if row % 2:
            for c in range(out.shape[0]):
                out[c] = source[c] & mask
        else:
            for c in range(out.shape[0]):
                out[c] = source[c] >> four


# Multi-bit quantisation.


@_kernel("Tuple((f4, f4))(f4[::1], u1[::1], u1)", fastmath=_FASTMATH)
def _begin(x, code, base):  # type: ignore[no-untyped-def]
    total = squares = _ZERO
    for i in range(x.shape[0]):
        total += x[i]
        squares += x[i] * x[i]
        code[i] = base
    return total, squares


@_kernel("void(f4[::1], u1[::1], f4[::1], u1[::1], i8, f8[::1], f8[::1])", fastmath=_FASTMATH)
def _three(x, code, thresholds, deltas, j, counts, sums):  # type: ignore[no-untyped-def]
    """Thresholds j to j+2: flip the codes of all elements at or above each, count and sum these elements."""
    t0, t1, t2 = thresholds[j], thresholds[j + 1], thresholds[j + 2]
    d0, d1, d2 = deltas[j], deltas[j + 1], deltas[j + 2]
    n0 = n1 = n2 = s0 = s1 = s2 = _ZERO
    for i in range(x.shape[0]):
        value = x[i]
        above0, above1, above2 = value >= t0, value >= t1, value >= t2
        c = code[i]
        c ^= d0 if above0 else _NONE
        c ^= d1 if above1 else _NONE
        c ^= d2 if above2 else _NONE
        code[i] = c
        n0 += _ONE if above0 else _ZERO
        n1 += _ONE if above1 else _ZERO
        n2 += _ONE if above2 else _ZERO
        s0 += value if above0 else _ZERO
        s1 += value if above1 else _ZERO
        s2 += value if above2 else _ZERO
    counts[j] += n0
    counts[j + 1] += n1
    counts[j + 2] += n2
    sums[j] += s0
    sums[j + 1] += s1
    sums[j + 2] += s2


@_kernel("Tuple((f8, f8))(f4[::1], u1[::1], f4[::1], u1[::1], u1, f8[::1], f8[::1])")
def _classify(x, code, thresholds, deltas, base, counts, sums):  # type: ignore[no-untyped-def]
    """Codes of a run; adds to the counts and sums at and above each threshold. Returns sum and sum of squares."""
    total = squares = 0.0
    for low in range(0, x.shape[0], _RUN):
        run = x[low : low + _RUN]
        part = code[low : low + run.shape[0]]
        t, s = _begin(run, part, base)
        total += t
        squares += s
        for j in range(0, thresholds.shape[0], 3):
            _three(run, part, thresholds, deltas, j, counts, sums)
    return total, squares


@_kernel("f8(f4[:,::1], f4[::1], u1[::1], u1[::1], i8, b1, u1[:,::1], f8[::1], f8[::1])")
def encode_levels(x, thresholds, deltas, codes, bits, flat, planes, counts, sums):  # type: ignore[no-untyped-def]
    """Bit planes of ``x``, with the number of elements and their sum per rank; returns the sum of squares."""
    n, cols = x.shape
    run = x.reshape(-1)
    code = np.empty(_BLOCK, np.uint8)
    above = np.zeros(thresholds.shape[0], np.float64)
    above_sums = np.zeros(thresholds.shape[0], np.float64)
    total = squares = 0.0
    if flat:
        for low in range(0, run.shape[0], _BLOCK):
            part = run[low : low + _BLOCK]
            t, s = _classify(part, code, thresholds, deltas, codes[0], above, above_sums)
            total += t
            squares += s
            padded = (part.shape[0] + 7) // 8 * 8
            code[part.shape[0] : padded] = 0
            _pack_run(code[:padded], bits, planes, low // 8)
    else:
        for row in range(0, n, 8):
            rows = min(8, n - row)
            for left in range(0, cols, _WIDTH):
                width = min(_WIDTH, cols - left)
                # Whole rows lie in one run; short ones would otherwise cost a call each.
                joined = rows if width == cols else 1
                for r in range(0, rows, joined):
                    at = (row + r) * cols + left
                    part = run[at : at + joined * width]
                    t, s = _classify(part, code[r * width :], thresholds, deltas, codes[0], above, above_sums)
                    total += t
                    squares += s
                code[rows * width : 8 * width] = 0
                _pack_rows(code[: 8 * width].reshape(8, width), bits, planes, row // 8 * cols + left)
    last = codes.shape[0] - 1
    counts[0] = run.shape[0] - above[0]
    sums[0] = total - above_sums[0]
    for rank in range(1, last):
        counts[rank] = above[rank - 1] - above[rank]
        sums[rank] = above_sums[rank - 1] - above_sums[rank]
    counts[last] = above[last - 1]
    sums[last] = above_sums[last - 1]
    for rank in range(last + 1):
        # What rounding leaves in an empty rank would contradict the counts, which the solver does not forgive.
        if counts[rank] == 0:
            sums[rank] = 0.0
    return squares


@_kernel("Tuple((f4, f4, f4, f4))(f4[::1], u1[::1], f4[::1], i8, f4[::1])", fastmath=_FASTMATH)
def _residue(x, code, a, bits, rest):  # type: ignore[no-untyped-def]
    """What the first ``bits`` greedy signs leave of a run, and those signs as codes.

    Returns the sum of the magnitudes of what is left, its sum and its sum of squares, and the sum of squares of x.
    """
    for i in range(x.shape[0]):
        rest[i] = x[i]
        code[i] = _NONE
    for p in range(bits):
        step = a[p]
        bit = np.uint8(1 << p)
        for i in range(x.shape[0]):
            up = rest[i] >= _ZERO
            rest[i] += -step if up else step
            code[i] |= bit if up else _NONE
    magnitude = total = squares = whole = _ZERO
    for i in range(x.shape[0]):
        magnitude += abs(rest[i])
        total += rest[i]
        squares += rest[i] * rest[i]
        whole += x[i] * x[i]
    return magnitude, total, squares, whole


@_kernel("Tuple((f8, f8, f8))(f4[::1], i8, f4[::1], u1[::1])")
def encode_residue(x, bits, a, codes):  # type: ignore[no-untyped-def]
    """Residue initialisation: fills ``a`` and ``codes``; returns sum and squares of the residue, and squares of x."""
    rest = np.empty(_RUN, np.float32)
    total = squares = whole = 0.0
    for p in range(bits + 1):
        magnitude = total = squares = whole = 0.0
        for low in range(0, x.shape[0], _RUN):
            run = x[low : low + _RUN]
            m, t, s, w = _residue(run, codes[low : low + run.shape[0]], a, p, rest)
            magnitude += m
            total += t
            squares += s
            whole += w
        if p < bits:
            a[p] = magnitude / x.shape[0]
    return total, squares, whole


@_kernel("void(u1[::1], u1[::1], u1, u1, f4[::1], f4[::1])")
def _select4(code0, code1, mask0, mask1, table, out):  # type: ignore[no-untyped-def]
    """Four levels by two bits: selections vectorise where reads from a table do not."""
    t0, t1, t2, t3 = table[0], table[1], table[2], table[3]
    for i in range(out.shape[0]):
        bit0 = (code0[i] & mask0) != 0
        low = t1 if bit0 else t0
        high = t3 if bit0 else t2
        out[i] = high if (code1[i] & mask1) != 0 else low


@_kernel("void(u1[::1], u1[::1], u1[::1], u1[::1], u1, u1, u1, u1, f4[::1], f4[::1])")
def _select16(code0, code1, code2, code3, mask0, mask1, mask2, mask3, t, out):  # type: ignore[no-untyped-def]
    """Sixteen levels by four bits."""
    t0, t1, t2, t3, t4, t5, t6, t7 = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    t8, t9, ta, tb, tc, td, te, tf = t[8], t[9], t[10], t[11], t[12], t[13], t[14], t[15]
    for i in range(out.shape[0]):
        bit0, bit1 = (code0[i] & mask0) != 0, (code1[i] & mask1) != 0
        bit2, bit3 = (code2[i] & mask2) != 0, (code3[i] & mask3) != 0
        v0 = t1 if bit0 else t0
        v1 = t3 if bit0 else t2
        v2 = t5 if bit0 else t4
        v3 = t7 if bit0 else t6
        v4 = t9 if bit0 else t8
        v5 = tb if bit0 else ta
        v6 = td if bit0 else tc
        v7 = tf if bit0 else te
        v0 = v1 if bit1 else v0
        v2 = v3 if bit1 else v2
        v4 = v5 if bit1 else v4
        v6 = v7 if bit1 else v6
        v0 = v2 if bit2 else v0
        v4 = v6 if bit2 else v4
        out[i] = v4 if bit3 else v0


@_kernel("void(u1[::1], f4[::1], f4[::1])")
def _look_up(code, table, out):  # type: ignore[no-untyped-def]
    one, two, four, eight = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8)
    if table.shape[0] == 4:
        _select4(code, code, one, two, table, out)
    elif table.shape[0] == 16:
        _select16(code, code, code, code, one, two, four, eight, table, out)
    else:
        for i in range(out.shape[0]):
            out[i] = table[code[i]]


@_kernel("void(u1[:,::1], i8, b1, f4[::1], f4[:,::1])")
def decode_planes(planes, bits, flat, table, out):  # type: ignore[no-untyped-def]
    """``out = table[code]``. The table holds 4, 16 or 256 values.

    For one and three bits the upper half of the table repeats the values of the codes with the highest bit set: there
    the highest plane is read twice.
    """
    n, cols = out.shape
    run = out.reshape(-1)
    code = np.empty(_BLOCK, np.uint8)
    if flat:
        for low in range(0, run.shape[0], _BLOCK):
            part = run[low : low + _BLOCK]
            _unpack_run(planes, bits, low // 8, code[: (part.shape[0] + 7) // 8 * 8])
            _look_up(code, table, part)
        return
    for row in range(0, n, 8):
        rows = min(8, n - row)
        for left in range(0, cols, _WIDTH):
            width = min(_WIDTH, cols - left)
            first = row // 8 * cols + left
            if table.shape[0] == 256:
                _unpack_rows(planes, bits, first, code[: 8 * width].reshape(8, width))
            for r in range(rows):
                at = (row + r) * cols + left
                part = run[at : at + width]
                m = np.uint8(128 >> r)
                if table.shape[0] == 4:
                    _select4(planes[0, first:], planes[bits - 1, first:], m, m, table, part)
                elif table.shape[0] == 16:
                    two, three = planes[2, first:], planes[bits - 1, first:]
                    _select16(planes[0, first:], planes[1, first:], two, three, m, m, m, m, table, part)
                else:
                    _look_up(code[r * width :], table, part)


# Stochastic quantisation. No fastmath where a rounding decides: both implementations give the same bits.


def _bitcast(typing, value):  # type: ignore[no-untyped-def]
    """The bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


_pattern: Any = intrinsic(_bitcast)


@_kernel("u4(u4[::1])")
def _largest(patterns):  # type: ignore[no-untyped-def]
    """Largest magnitude, on the bit patterns: they order like the floats, with infinity and NaN on top."""
    largest = np.uint32(0)
    for i in range(patterns.shape[0]):
        magnitude = np.uint32(patterns[i] & np.uint32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    return largest


@_kernel("void(u4[::1], i8, u4[::1])")
def block_maxima(patterns, block, out):  # type: ignore[no-untyped-def]
    """Largest magnitude of every block, all as bit patterns; the last of ``out`` is that of the whole."""
    blocks = out.shape[0] - 1
    for b in range(blocks):
        out[b] = _largest(patterns[b * block : min((b + 1) * block, patterns.shape[0])])
    out[blocks] = _largest(out[:blocks])


@_kernel("void(f4[::1], f4, f4, f4[::1], u2[::1])")
def block_scales(maxima, largest, scale, scales, fractions):  # type: ignore[no-untyped-def]
    """The smallest float16 fraction of ``largest`` at or above each of ``maxima``, and the scale that it gives."""
    for b in range(scales.shape[0]):
        fraction = np.float32(maxima[b] / largest)
        if fraction >= np.float32(2**-14):
            pattern = _pattern(fraction)
            half = ((pattern >> 13) & 0x3FF) + (((pattern >> 23) - 112) << 10) + ((pattern & 0x1FFF) != 0)
            rounded = np.float32((1024 + (half & 0x3FF)) * 2.0 ** np.float64(np.int64(half >> 10) - 25))
        else:
            half = np.int64(np.ceil(np.float64(fraction) * 2.0**24))
            rounded = np.float32(half * 2.0**-24)
        fractions[b] = np.uint16(half)
        scales[b] = np.float32(rounded * scale)


@_kernel("void(f4[::1], u4[::1], f4, f4, f4, f4, u4, u4, u1[::1])")
def _round(x, weyl, inverse, magic, lowest, highest, key0, key1, out):  # type: ignore[no-untyped-def]
    """Hash the element's number to r in [-1/2, 1/2), and round x + r to the nearest step.

    Adding ``magic``, 1.5 * 2**23 and the code of zero, rounds to whole numbers and leaves the code in the low byte.
    """
    for i in range(x.shape[0]):
        # numba widens 32-bit arithmetic to 64 bits unless every step is narrowed again.
        h = np.uint32(weyl[i] + key0)
        h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(15))) ^ key1)
        h = np.uint32(h * np.uint32(0x85EBCA77))
        h = np.uint32(h ^ np.uint32(h >> np.uint32(13)))
        h = np.uint32(h * np.uint32(0xC2B2AE3D))
        chance = np.float32(np.int32(h)) * np.float32(2**-32)
        y = np.float32(np.float32(np.float32(x[i] * inverse) + chance) + magic)
        y = highest if y > highest else y
        y = lowest if y < lowest else y
        out[i] = np.uint8(_pattern(y))


@_kernel("Tuple((f4, f4))(f4[::1], f4, u1[::1], i4, u1)", fastmath=_FASTMATH)
def _miss(x, inverse, code, offset, flip):  # type: ignore[no-untyped-def]
    error = squares = _ZERO
    for i in range(x.shape[0]):
        u = x[i] * inverse
        miss = np.float32(np.int32(code[i] ^ flip) - offset) - u
        error += miss * miss
        squares += u * u
    return error, squares


@_kernel("Tuple((f8, f8))(f4[::1], u4[::1], f4[::1], i8, i8, u4, u4, u1[::1])")
def round_stochastically(x, weyl, scales, block, bits, key0, key1, out):  # type: ignore[no-untyped-def]
    """Codes of ``x`` [n] under a scale per block; ``weyl`` [2048] holds multiples of its second entry.

    Returns squared error and sum of squares, both of the same runs: the first sixteen and a pseudo-random
    thirty-second of the others. Enough to watch, where the full sums would cost as much as the rounding.
    """
    limit = np.float32((1 << (bits - 1)) - 1)
    offset = np.float32(0 if bits == 8 else 1 << (bits - 1))
    magic = np.float32(np.float32(12582912.0) + offset)
    lowest, highest = np.float32(magic - limit), np.float32(magic + limit)
    error = squares = 0.0
    for b in range(scales.shape[0]):
        stop = min((b + 1) * block, x.shape[0])
        # A little too large, so that the largest value lands on the last step for certain; the rounding stops there.
        inverse = np.float32(np.float32(_ONE / scales[b]) * np.float32(1 + 2**-22)) if scales[b] > 0 else _ZERO
        for low in range(b * block, stop, _RUN):
            run = x[low : min(low + _RUN, stop)]
            code = out[low : low + run.shape[0]]
            start = np.uint32(np.uint32(np.uint32(low) * weyl[1]) + key0)
            _round(run, weyl, inverse, magic, lowest, highest, start, key1, code)
            number = np.uint32(low // min(block, _RUN))
            if number < 16 or np.uint32(number * weyl[1]) < np.uint32(1 << 27):
                flip = np.uint8(0x80 if bits == 8 else 0)
                e, s = _miss(run, inverse, code, np.int32(1 << (bits - 1)), flip)
                weight = np.float64(scales[b]) * np.float64(scales[b])
                error += e * weight
                squares += s * weight
    return error, squares


@_kernel("void(u1[::1], f4, i4, u1, f4[::1])")
def _scale(code, scale, offset, flip, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        out[i] = np.float32(np.int32(code[i] ^ flip) - offset) * scale


@_kernel("void(u1[::1], f4[::1], i8, i8, f4[::1])")
def dequantise(codes, scales, block, bits, out):  # type: ignore[no-untyped-def]
    """Float32 values of ``codes`` [n] under a scale per block, into ``out``."""
    offset = np.int32(1 << (bits - 1))
    flip = np.uint8(0x80 if bits == 8 else 0)
    for b in range(scales.shape[0]):
        low, high = b * block, min((b + 1) * block, out.shape[0])
        _scale(codes[low:high], scales[b], offset, flip, out[low:high])
