"""The compiled loops of chunked top-k with error feedback (SparseLoCo, arXiv 2508.15706).

    e = beta e + d                          d: the pseudo-gradient, e: the residual, which stays with its cluster
    send the k largest |e| of every 4,096 as 12-bit positions and 2-bit values: a sign, and a high or a low level
    e = e - what was sent

Why: a line of 20 Mbit/s. At k = 64 a value costs 0.23 bits; what is not sent is not lost but sent later. The paper cuts a tensor
into squares of 64 x 64 and quantises between +-6 sigma; here a block is 4,096 neighbours of the flat layout, and its two levels are the
means of the kept magnitudes from their common mean up, and below it, which suits whatever distribution a block has.

Of equal magnitudes the lowest positions are kept. Sums run in fp64 in the order of the positions. So the choice, the levels and the
residual have the same bits on every machine. Zeros may be sent (a block of zeros sends zeros): the size of a chunk depends on its
count alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isles.codec.format import SPARSE_BLOCK
from isles.codec.kernels import SIGNLESS, STRIP, Bytes, Floats, as_float, as_int, f32, i32, read_bf16
from isles.jit import kernel

Positions = NDArray[np.int64]


@kernel
def check_feedback(base: Floats, local: Floats, step: int, residual: Floats, beta: np.float32, largest: np.int32) -> int:
    """-1, or the start of the first strip in which a value of e is above `largest`. Looked for before the residual is touched, so
    that a refused contribution leaves it as it was."""
    bad = -1
    for start in range(0, base.size, STRIP):
        stop = min(start + STRIP, base.size)
        b, x, r = base[start:stop], local[start * step : start * step + stop - start], residual[start:stop]
        highest = i32(0)
        for j in range(b.size):
            highest = max(highest, i32(as_int(beta * r[j] + (b[j] - x[j])) & SIGNLESS))
        if highest > largest and bad < 0:
            bad = start
    return bad


@kernel
def at_least(bits: NDArray[np.int32], threshold: np.int32) -> int:
    """How many magnitudes reach the threshold."""
    count = i32(0)
    for j in range(bits.size):
        count = i32(count + i32(bits[j] >= threshold))
    return int(count)


@kernel
def select(bits: NDArray[np.int32], entries: int, positions: Positions) -> None:
    """The positions, rising, of the `entries` largest magnitudes; of equal ones the lowest.

    Bisects for the threshold: a pass that counts is vectorised and reads 16 KiB of first-level cache, and about fifteen of them
    part the k-th magnitude from the next one; that is quicker than a histogram, which counts one value at a time."""
    low, high = i32(0), i32(0x7F800000)  # at least `entries` magnitudes reach low, fewer reach high
    while high - low > 1:
        middle = i32((low + high) >> 1)
        count = at_least(bits, middle)
        if count < entries:
            high = middle
        else:
            low = middle
            if count == entries:
                break
    ties = entries - at_least(bits, i32(low + 1))  # of the magnitudes equal to low
    found = 0
    for j in range(bits.size):
        if bits[j] >= low and (bits[j] > low or ties > 0):
            ties -= bits[j] == low
            positions[found] = j
            found += 1


@kernel
def round_bf16(value: float) -> int:
    """The 16 bits of the nearest bf16 of an fp64 that fits, by way of fp32."""
    bits = as_int(f32(value))
    return int(bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@kernel
def find_levels(bits: NDArray[np.int32], positions: Positions) -> tuple[float, int, int]:
    """The mean of the kept magnitudes, and the bf16 means of those under it (0 when there are none) and of the others."""
    total = 0.0
    for i in range(positions.size):
        total += np.float64(as_float(bits[positions[i]]))
    mean = total / positions.size
    under, under_sum, over_sum = 0, 0.0, 0.0
    for i in range(positions.size):
        magnitude = np.float64(as_float(bits[positions[i]]))
        if magnitude < mean:
            under += 1
            under_sum += magnitude
        else:
            over_sum += magnitude
    low = round_bf16(under_sum / under) if under else 0
    return mean, low, round_bf16(over_sum / (positions.size - under))


@kernel
def write_block(e: Floats, bits: NDArray[np.int32], positions: Positions, out: Bytes) -> None:
    """Write one block and take what it says out of e."""
    m = positions.size
    mean, low, high = find_levels(bits, positions)
    low_level, high_level = as_float(i32(low << 16)), as_float(i32(high << 16))
    out[0], out[1], out[2], out[3] = low & 255, low >> 8, high & 255, high >> 8
    at = 4
    for i in range(0, m - 1, 2):
        first, second = positions[i], positions[i + 1]
        out[at], out[at + 1], out[at + 2] = first & 255, first >> 8 | (second & 15) << 4, second >> 4
        at += 3
    if m % 2:
        out[at], out[at + 1] = positions[m - 1] & 255, positions[m - 1] >> 8
        at += 2
    codes = out[at:]
    codes[:] = 0
    for i in range(m):
        j = positions[i]
        over, negative = np.float64(as_float(bits[j])) >= mean, as_int(e[j]) < 0
        level = high_level if over else low_level
        e[j] -= -level if negative else level
        codes[i >> 2] |= (int(negative) | int(over) << 1) << (2 * (i & 3))


@kernel
def encode_topk(base: Floats, local: Floats, step: int, residual: Floats, beta: np.float32, k: int, payload: Bytes) -> None:
    """Encode what `check_feedback` has let pass; updates the residual."""
    scratch, kept = np.empty(SPARSE_BLOCK, np.int32), np.empty(SPARSE_BLOCK, np.int64)
    at = 0
    for start in range(0, base.size, SPARSE_BLOCK):
        stop = min(start + SPARSE_BLOCK, base.size)
        b, x, e = base[start:stop], local[start * step : start * step + stop - start], residual[start:stop]
        bits = scratch[: stop - start]
        for j in range(e.size):
            value = beta * e[j] + (b[j] - x[j])
            e[j] = value
            bits[j] = as_int(value) & SIGNLESS
        entries = min(k, (k * e.size + SPARSE_BLOCK - 1) // SPARSE_BLOCK)
        size = 4 + (12 * entries + 7) // 8 + (2 * entries + 7) // 8
        select(bits, entries, kept)
        write_block(e, bits, kept[:entries], payload[at : at + size])
        at += size


@kernel
def read_position(block: Bytes, i: int) -> np.int64:
    at = 4 + 3 * (i >> 1)
    if i & 1:
        return np.int64(block[at + 1]) >> 4 | np.int64(block[at + 2]) << 4
    return np.int64(block[at]) | (np.int64(block[at + 1]) & 15) << 8


@kernel
def topk_fits(payload: Bytes, count: int, k: int) -> bool:
    """Whether the levels of every block are finite, not negative and in order, and its positions rise and lie inside of it."""
    at = 0
    for start in range(0, count, SPARSE_BLOCK):
        length = min(SPARSE_BLOCK, count - start)
        entries = min(k, (k * length + SPARSE_BLOCK - 1) // SPARSE_BLOCK)
        size = 4 + (12 * entries + 7) // 8 + (2 * entries + 7) // 8
        block, previous = payload[at : at + size], np.int64(-1)
        low, high = np.int64(block[0]) | np.int64(block[1]) << 8, np.int64(block[2]) | np.int64(block[3]) << 8
        if not low <= high < 0x7F80:
            return False
        for i in range(entries):
            position = read_position(block, i)
            if not previous < position < length:
                return False
            previous = position
        at += size
    return True


@kernel
def add_topk(payload: Bytes, k: int, weight: np.float32, total: Floats) -> None:
    """total += weight * value at the kept positions; the others keep their bits."""
    at = 0
    for start in range(0, total.size, SPARSE_BLOCK):
        o = total[start : min(start + SPARSE_BLOCK, total.size)]
        entries = min(k, (k * o.size + SPARSE_BLOCK - 1) // SPARSE_BLOCK)
        positions_bytes = (12 * entries + 7) // 8
        block, codes = payload[at:], payload[at + 4 + positions_bytes :]
        low, high = read_bf16(block, 0), read_bf16(block, 2)
        for i in range(entries):
            code = codes[i >> 2] >> (2 * (i & 3))
            level = high if code & 2 else low
            o[read_position(block, i)] += weight * (-level if code & 1 else level)
        at += 4 + positions_bytes + (2 * entries + 7) // 8
