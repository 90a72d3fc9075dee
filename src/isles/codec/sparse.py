"""Chunked top-k with 2-bit values and error feedback, after SparseLoCo (arXiv 2508.15706).

    e = beta e + d;  of every 4,096 entries of e the k largest are sent;  e -= what was sent

An entry is a 12-bit position and a 2-bit value: its sign, and whether it is of the upper or the lower part of the kept magnitudes.
The parts meet at the mean of the kept magnitudes; each part's own mean is its level, two bf16 a block. Of equal magnitudes the lowest
position goes first, so that the choice is the same on every machine. Payload, each section over the whole chunk: levels (lower, upper
a block), positions (two in three bytes, the earlier in the low bits), values (four in a byte, the earlier in the low bits).
"""

from __future__ import annotations

import numpy as np

from isles.codec.format import TOPK_BLOCK
from isles.codec.kernels import INFINITE, MAGNITUDE, kernel


@kernel
def accumulate_residual(base, local, subtract, residual, beta, out):  # type: ignore[no-untyped-def]
    """out = beta residual + d. Returns -1, or the position of the first value that is not finite; the residual is untouched."""
    for i in range(out.size):
        d = base[i] - local[i] if subtract else base[i]
        out[i] = beta * residual[i] + d
    bits = out.view(np.uint32)
    for i in range(out.size):
        if np.uint32(bits[i] & MAGNITUDE) >= INFINITE:
            return i
    return -1


@kernel
def _threshold(bits, n, k):  # type: ignore[no-untyped-def]
    """The k-th largest magnitude (as bits) among n, and how many of exactly that magnitude are kept: a radix selection."""
    prefix, mask, left = np.uint32(0), np.uint32(0), k
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        size = 1 << width
        counts = np.zeros(size, np.int64)
        for j in range(n):
            m = np.uint32(bits[j] & MAGNITUDE)
            if np.uint32(m & mask) == prefix:
                counts[(m >> np.uint32(shift)) & np.uint32(size - 1)] += 1
        digit = size - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = np.uint32(prefix | np.uint32(digit << shift))
        mask = np.uint32(mask | np.uint32((size - 1) << shift))
    return prefix, left


@kernel
def _nearest_bf16(value):  # type: ignore[no-untyped-def]
    one = np.empty(1, np.float32)
    one[0] = value
    b = one.view(np.uint32)[0]
    return np.uint16(np.uint32(b + np.uint32(0x7FFF) + np.uint32((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel
def _from_bf16(code):  # type: ignore[no-untyped-def]
    one = np.empty(1, np.uint32)
    one[0] = np.uint32(code) << np.uint32(16)
    return one.view(np.float32)[0]


@kernel
def _select(e, bits, kept, positions):  # type: ignore[no-untyped-def]
    """Positions of the kept entries of one block, rising."""
    threshold, ties = _threshold(bits, e.size, kept)
    found = 0
    for j in range(e.size):
        m = np.uint32(bits[j] & MAGNITUDE)
        if m > threshold:
            positions[found] = j
            found += 1
        elif m == threshold and ties > 0:
            positions[found] = j
            found += 1
            ties -= 1


@kernel
def _levels(e, positions, kept):  # type: ignore[no-untyped-def]
    """Mean of the kept magnitudes, and the bf16 means of the part below it and of the rest."""
    total = 0.0
    for i in range(kept):
        total += np.float64(abs(e[positions[i]]))
    mean = np.float32(total / kept)
    low, high, lows = 0.0, 0.0, 0
    for i in range(kept):
        magnitude = abs(e[positions[i]])
        if magnitude < mean:
            low += np.float64(magnitude)
            lows += 1
        else:
            high += np.float64(magnitude)
    low_level = np.float32(low / lows) if lows else np.float32(0)
    high_level = np.float32(high / (kept - lows)) if lows < kept else np.float32(0)
    return mean, _nearest_bf16(low_level), _nearest_bf16(high_level)


@kernel
def encode_topk(e, k, levels, positions_out, values_out):  # type: ignore[no-untyped-def]
    """Encode the accumulated e and subtract from it what is sent. Returns -1, or the start of a block whose level overflows bf16."""
    bits = e.view(np.uint32)
    positions = np.empty(TOPK_BLOCK, np.int64)
    entry = 0
    for block in range(levels.size // 2):
        start = block * TOPK_BLOCK
        part = e[start : min(start + TOPK_BLOCK, e.size)]
        kept = min(k, -(-k * part.size // TOPK_BLOCK))
        _select(part, bits[start : start + part.size], kept, positions)
        mean, low, high = _levels(part, positions, kept)
        if low >= np.uint16(0x7F80) or high >= np.uint16(0x7F80):
            return start
        levels[2 * block], levels[2 * block + 1] = low, high
        low_value, high_value = _from_bf16(low), _from_bf16(high)
        for i in range(kept):
            j = positions[i]
            upper = abs(part[j]) >= mean
            negative = part[j] < 0
            level = high_value if upper else low_value
            part[j] -= -level if negative else level
            code = np.uint8((2 if upper else 0) | (1 if negative else 0))
            if entry % 2 == 0:
                positions_out[entry // 2 * 3] = np.uint8(j & 255)
                positions_out[entry // 2 * 3 + 1] = np.uint8(j >> 8)
            else:
                positions_out[entry // 2 * 3 + 1] |= np.uint8((j & 15) << 4)
                positions_out[entry // 2 * 3 + 2] = np.uint8(j >> 4)
            values_out[entry // 4] |= np.uint8(code << np.uint8(2 * (entry % 4)))
            entry += 1
    return -1


@kernel
def decode_topk(levels, positions_in, values_in, k, weight, out, check):  # type: ignore[no-untyped-def]
    """Add weight * value to `out` at every position; with `check` only look. Returns False when positions do not rise or do not fit."""
    entry = 0
    for block in range(levels.size // 2):
        start = block * TOPK_BLOCK
        part = out[start : min(start + TOPK_BLOCK, out.size)]
        kept = min(k, -(-k * part.size // TOPK_BLOCK))
        low, high = _from_bf16(levels[2 * block]), _from_bf16(levels[2 * block + 1])
        before = -1
        for _ in range(kept):
            at = entry // 2 * 3
            if entry % 2 == 0:
                j = np.int64(positions_in[at]) | ((np.int64(positions_in[at + 1]) & 15) << 8)
            else:
                j = (np.int64(positions_in[at + 1]) >> 4) | (np.int64(positions_in[at + 2]) << 4)
            if j <= before or j >= part.size:
                return False
            before = j
            if not check:
                code = (values_in[entry // 4] >> np.uint8(2 * (entry % 4))) & np.uint8(3)
                level = high if code & 2 else low
                part[j] += weight * (-level if code & 1 else level)
            entry += 1
    return True
