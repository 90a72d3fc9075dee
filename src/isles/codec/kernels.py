"""The codecs' inner loops, compiled: one pass from base and local values to bytes, and from bytes into an accumulator.

Work goes block by block through a small scratch that stays in the first-level cache, so memory sees each input once and each
output once, and no temporary the size of the model exists. What makes the loops vectorise, and keeps them exact:

- The largest magnitude is found among the *bits* without sign, as integers: a floating maximum would need permission to ignore NaN,
  and NaN and infinity come out as the largest integers, so the finiteness check is free.
- Rounding to nearest-even is adding 1.5 x 2^23: the integer then stands in the low bits.
- No fastmath and no fused multiply-add: every IEEE machine gives the same bytes and the same sums.

A kernel returns -1, or the position of the first value that cannot be sent. `reference.py` says the same in plain torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

MAGIC = np.float32(12582912.0)  # 1.5 * 2**23
INFINITE = np.uint32(0x7F800000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
TILE = 2048  # values worked on at a time: 8 KiB, well inside the first-level cache
SMALLEST = np.float32(2.0**-126)  # smallest normal number: a block whose scale is below it is sent as zeros


def kernel(function: Any) -> Any:
    """Compiled on first use, cached on disk, without the interpreter lock."""
    return njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function)


@kernel
def _load(base, local, subtract, start, stop, scratch):  # type: ignore[no-untyped-def]
    """d = base - local (or base) of one block into the scratch."""
    b = base[start:stop]
    if subtract:
        x = local[start:stop]
        for j in range(b.size):
            scratch[j] = b[j] - x[j]
    else:
        for j in range(b.size):
            scratch[j] = b[j]


@kernel
def _largest(bits, n):  # type: ignore[no-untyped-def]
    """Largest magnitude among the first n values, as bits."""
    largest = np.uint32(0)
    for j in range(n):
        magnitude = np.uint32(bits[j] & MAGNITUDE)
        largest = max(largest, magnitude)
    return largest


@kernel
def first_bad(bits, n, limit):  # type: ignore[no-untyped-def]
    """Position of the first magnitude at or above the limit."""
    for j in range(n):
        if np.uint32(bits[j] & MAGNITUDE) >= limit:
            return j
    return 0


@kernel
def _uniform(index, key):  # type: ignore[no-untyped-def]
    """A number in [0, 1) from a counter: murmur3's finalizer over position and key. Independent of how chunks are cut."""
    h = np.uint32(np.uint32(index) ^ key)
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(h >> np.uint32(8)) * np.float32(2.0**-24)


@kernel
def _scales(largest, levels, scales, inverses):  # type: ignore[no-untyped-def]
    """From the largest magnitudes (bits) of blocks to bf16 scales and their fp32 inverses; both 0 where the scale would be too small."""
    real = largest.view(np.float32)
    for i in range(largest.size):
        real[i] = real[i] / np.float32(levels)
    for i in range(largest.size):
        largest[i] = np.uint32((np.uint64(largest[i]) + np.uint64(0xFFFF)) >> np.uint64(16)) << np.uint32(16)
    for i in range(largest.size):
        usable = real[i] >= SMALLEST
        inverses[i] = np.float32(1.0) / real[i] if usable else np.float32(0)
        scales[i] = np.uint16(largest[i] >> np.uint32(16)) if usable else np.uint16(0)


@kernel
def _round_stochastic(values, whole, inverse, levels, key, position):  # type: ignore[no-untyped-def]
    """floor(value / scale + u): right on average. `whole` is `values` seen as int32."""
    for j in range(values.size):
        t = values[j] * inverse + _uniform(position + j, key)
        q = np.int32(t + np.float32(256.0)) - np.int32(256)
        whole[j] = np.int32(min(max(q, np.int32(-levels)), np.int32(levels)))


@kernel
def _pack_int8(whole, codes):  # type: ignore[no-untyped-def]
    for i in range(whole.shape[0]):
        for j in range(whole.shape[1]):
            codes[i, j] = np.int8(whole[i, j])


@kernel
def _pack_int4(whole, codes):  # type: ignore[no-untyped-def]
    """Byte j of a block holds value j in its low and value j + half in its high nibble: no shuffle is needed."""
    half = codes.shape[1]
    for i in range(whole.shape[0]):
        low, high = whole[i, :half], whole[i, half:]
        for j in range(half):
            codes[i, j] = np.uint8((low[j] & np.int32(15)) | ((high[j] & np.int32(15)) << np.int32(4)))


def _blockwise(levels: int, pack: Any, code_type: Any) -> Any:
    """The encoder of int8 (127 levels) or int4 (7): tiles of whole blocks, then what is left over as padded blocks."""

    @kernel
    def tile(base, local, subtract, blocks, width, block, scales, codes, stochastic, key, position, scratch):  # type: ignore[no-untyped-def]
        values = scratch[: blocks * block]
        _load(base, local, subtract, 0, base.size, values)
        for j in range(base.size, values.size):
            values[j] = np.float32(0)
        rows, bits = values.reshape(blocks, block), values.view(np.uint32).reshape(blocks, block)
        largest, inverses = np.empty(blocks, np.uint32), np.empty(blocks, np.float32)
        top = np.uint32(0)
        for i in range(blocks):
            m = np.uint32(0)
            for j in range(block):
                m = max(m, np.uint32(bits[i, j] & MAGNITUDE))
            largest[i] = m
            top = max(top, m)
        if top >= INFINITE:
            return first_bad(values.view(np.uint32), base.size, INFINITE)
        _scales(largest, levels, scales, inverses)
        whole = values.view(np.int32).reshape(blocks, block)
        for i in range(blocks):
            inverse = inverses[i]
            if stochastic:
                _round_stochastic(rows[i], whole[i], inverse, levels, key, position + i * block)
            else:
                for j in range(block):
                    rows[i, j] = rows[i, j] * inverse + MAGIC
        pack(whole, codes.view(code_type).reshape(blocks, width))
        return -1

    @kernel
    def encode(base, local, subtract, scales, codes, block, width, stochastic, key, offset):  # type: ignore[no-untyped-def]
        per_tile = TILE // block
        scratch = np.empty(TILE, np.float32)
        spare = np.empty(TILE, np.uint8)
        done = 0
        while done < scales.size:
            blocks = min(per_tile, scales.size - done)
            start, stop = done * block, min((done + blocks) * block, base.size)
            part = codes[done * width : (done + blocks) * width]
            whole = part.size == blocks * width  # otherwise the last block is short, and written from a spare
            target = part if whole else spare[: blocks * width]
            b = base[start:stop]
            x = local[start:stop] if subtract else b
            bad = tile(b, x, subtract, blocks, width, block, scales[done : done + blocks], target, stochastic, key, offset + start, scratch)
            if bad >= 0:
                return start + bad
            if not whole:
                part[:] = target[: part.size]
            done += blocks
        return -1

    return encode


encode_int8 = _blockwise(127, _pack_int8, np.int8)
encode_int4 = _blockwise(7, _pack_int4, np.uint8)


@kernel
def encode_bf16(base, local, subtract, out):  # type: ignore[no-untyped-def]
    scratch = np.empty(256, np.float32)
    bits = scratch.view(np.uint32)
    limit = np.uint32(0x7F7F8000)  # from here on rounding to nearest-even gives infinity
    for start in range(0, base.size, 256):
        stop = min(start + 256, base.size)
        n = stop - start
        _load(base, local, subtract, start, stop, scratch)
        if _largest(bits, n) >= limit:
            return start + first_bad(bits, n, limit)
        o = out[start:stop]
        for j in range(n):
            b = bits[j]
            even = np.uint32((b >> np.uint32(16)) & np.uint32(1))
            o[j] = np.uint16(np.uint32(b + np.uint32(0x7FFF) + even) >> np.uint32(16))
    return -1


@kernel
def encode_fp32(base, local, subtract, out):  # type: ignore[no-untyped-def]
    bits = out.view(np.uint32)
    for start in range(0, base.size, 1024):
        stop = min(start + 1024, base.size)
        _load(base, local, subtract, start, stop, out[start:stop])
        block = bits[start:stop]
        if _largest(block, stop - start) >= INFINITE:
            return start + first_bad(block, stop - start, INFINITE)
    return -1


@kernel
def decode_int8(scales, codes, block, weight, accumulate, out):  # type: ignore[no-untyped-def]
    wide = np.empty(scales.size, np.uint32)
    real = wide.view(np.float32)
    for i in range(scales.size):
        wide[i] = np.uint32(scales[i]) << np.uint32(16)
    for i in range(scales.size):
        start, stop = i * block, min((i + 1) * block, out.size)
        scale, q, o = real[i], codes[start:stop], out[start:stop]
        if accumulate:
            for j in range(o.size):
                o[j] += weight * (np.float32(q[j]) * scale)
        else:
            for j in range(o.size):
                o[j] = np.float32(q[j]) * scale


@kernel
def decode_int4(scales, codes, block, weight, accumulate, out):  # type: ignore[no-untyped-def]
    wide = np.empty(scales.size, np.uint32)
    real = wide.view(np.float32)
    for i in range(scales.size):
        wide[i] = np.uint32(scales[i]) << np.uint32(16)
    half = block // 2
    low_part, high_part = np.empty(half, np.float32), np.empty(half, np.float32)
    for i in range(scales.size):
        start, stop = i * block, min((i + 1) * block, out.size)
        scale, q = real[i], codes[i * half : min((i + 1) * half, codes.size)]
        lower, upper = out[start : start + q.size], out[start + q.size : stop]
        for j in range(q.size):
            byte = np.int32(q[j])
            low_part[j] = np.float32(np.int32((byte & np.int32(15)) ^ np.int32(8)) - np.int32(8)) * scale
            high_part[j] = np.float32(np.int32((byte >> np.int32(4)) ^ np.int32(8)) - np.int32(8)) * scale
        if accumulate:
            for j in range(lower.size):
                lower[j] += weight * low_part[j]
            for j in range(upper.size):
                upper[j] += weight * high_part[j]
        else:
            for j in range(lower.size):
                lower[j] = low_part[j]
            for j in range(upper.size):
                upper[j] = high_part[j]


@kernel
def decode_bf16(codes, weight, accumulate, out):  # type: ignore[no-untyped-def]
    scratch = np.empty(256, np.float32)
    bits = scratch.view(np.uint32)
    for start in range(0, out.size, 256):
        stop = min(start + 256, out.size)
        q, o = codes[start:stop], out[start:stop]
        for j in range(q.size):
            bits[j] = np.uint32(q[j]) << np.uint32(16)
        if accumulate:
            for j in range(o.size):
                o[j] += weight * scratch[j]
        else:
            for j in range(o.size):
                o[j] = scratch[j]


@kernel
def accumulate_fp32(values, weight, out):  # type: ignore[no-untyped-def]
    for j in range(out.size):
        out[j] += weight * values[j]


@kernel
def all_finite_bf16(codes):  # type: ignore[no-untyped-def]
    """Whether no bf16 is NaN or infinite."""
    largest = np.uint16(0)
    for j in range(codes.size):
        largest = max(largest, np.uint16(codes[j] & np.uint16(0x7FFF)))
    return largest < np.uint16(0x7F80)


@kernel
def all_finite_fp32(bits):  # type: ignore[no-untyped-def]
    """Whether no fp32 (as uint32) is NaN or infinite."""
    return _largest(bits, bits.size) < INFINITE

