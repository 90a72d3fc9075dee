"""The compiled loops of the dense codecs: fp32, bf16, int8, int4.

Why numba: one pass from two vectors to bytes at the speed of memory, without the interpreter's lock (the agent encodes while
others send) and without a compiler on the host. Why the loops look as they do:

- A block's difference base - local is computed twice, once for its largest magnitude and once for its codes; the second time it
  comes from the first-level cache. So there is no temporary, and plain loops over slices, which LLVM vectorises.
- Magnitudes are compared as integers: the bits of a float without its sign order as the floats do, and NaN and infinity come out
  above every number, so that looking for them costs nothing. There is no fastmath, which would let the compiler forget them.
- Rounding to nearest-even is the addition of 1.5 * 2**23: the sum has no room for a fraction, and its low bits are the integer.
- Every product and sum is rounded on its own (no fused multiply-add): the same bits on every IEEE machine.

Scales. A block's scale is absmax / 127 (or 7) rounded up to bf16, and its reciprocal is rounded down, so no value ever lands
outside of the codes. A scale under the smallest normal number, 2**-126, becomes 0 and its block decodes to zeros: magnitudes
under 127 * 2**-126 (1.5e-36) are lost, which is far under the rounding of any parameter they could be added to.

Stochastic rounding adds noise in (-1/2, 1/2) first. The noise of a value is a hash of (seed, position in the flat layout), so
it needs no state, can be repeated, and does not depend on how the vector was cut into chunks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isles.jit import kernel

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

STRIP = 256  # values fp32 and bf16 look at before they say that one of them is not finite

f32, i32, u32 = np.float32, np.int32, np.uint32
SIGNLESS = i32(0x7FFFFFFF)
INFINITY = i32(0x7F800000)
SMALLEST_NORMAL = i32(0x00800000)
ROUND = f32(12582912.0)  # 1.5 * 2**23


@kernel
def as_int(value: np.float32) -> np.int32:
    return np.float32(value).view(np.int32)


@kernel
def as_float(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


# In all encoders: `local` is subtracted from `base`; `step` is 1, or 0 when there is no local, and `local` then is a block of
# zeros. `largest` is the codec's greatest magnitude, as bits. They return -1, or the start of the first block that exceeds it; they
# note it and go on, because a return from inside the loop makes numba count references to every slice (a third of the speed).


@kernel
def encode_fp32(base: Floats, local: Floats, step: int, largest: np.int32, out: Floats) -> int:
    bad = -1
    for start in range(0, base.size, STRIP):
        stop = min(start + STRIP, base.size)
        b, x, o = base[start:stop], local[start * step : start * step + stop - start], out[start:stop]
        highest = i32(0)
        for j in range(b.size):
            value = b[j] - x[j]
            o[j] = value
            highest = max(highest, i32(as_int(value) & SIGNLESS))
        if highest > largest and bad < 0:
            bad = start
    return bad


@kernel
def encode_bf16(base: Floats, local: Floats, step: int, largest: np.int32, out: NDArray[np.uint16]) -> int:
    bad = -1
    for start in range(0, base.size, STRIP):
        stop = min(start + STRIP, base.size)
        b, x, o = base[start:stop], local[start * step : start * step + stop - start], out[start:stop]
        highest = i32(0)
        for j in range(b.size):
            bits = as_int(b[j] - x[j])
            highest = max(highest, i32(bits & SIGNLESS))
            o[j] = np.uint16(u32(u32(bits) + u32(0x7FFF) + (u32(bits) >> u32(16) & u32(1))) >> u32(16))
        if highest > largest and bad < 0:
            bad = start
    return bad


@kernel
def highest_bits(b: Floats, x: Floats) -> np.int32:
    """The largest magnitude of b - x, as the bits of an fp32; above INFINITY when one is NaN."""
    highest = i32(0)
    for j in range(b.size):
        highest = max(highest, i32(as_int(b[j] - x[j]) & SIGNLESS))
    return highest


@kernel
def scale_bits(highest: np.int32, top: np.float32) -> np.int32:
    """highest / top, rounded up to bf16, as fp32 bits; 0 where that is not a normal number.

    The quotient itself is rounded to nearest, but never down onto a bf16: the next fp32 above top * s lies 64/127 or 4/7 of the
    quotient's last place above s, which is more than half of it."""
    bits = i32(i32(as_int(as_float(highest) / top) + i32(0xFFFF)) & i32(-0x10000))
    return bits if bits >= SMALLEST_NORMAL else i32(0)


@kernel
def reciprocal(bits: np.int32) -> np.float32:
    """1 / scale, rounded down; 0 for a scale of 0. Rounded up, absmax / scale could reach 127.00001, which the largest noise of
    stochastic rounding takes to 128: a byte that says -128."""
    if bits == 0:
        return f32(0)
    scale = as_float(bits)
    inverse = f32(1) / scale
    if np.float64(inverse) * np.float64(scale) > 1.0:  # exact in fp64
        inverse = as_float(as_int(inverse) - i32(1))
    return inverse


@kernel
def noise(counter: np.uint32, wrap: np.uint32, key: np.uint32, next_key: np.uint32) -> np.float32:
    """An odd multiple of 2**-17 in (-1/2, 1/2): the upper half of the hash lowbias32 of (position ^ key).

    counter, wrap: low 32 bits of the value's and of the chunk's first position; a counter below it has passed 2**32."""
    x = u32(counter ^ (key if counter >= wrap else next_key))
    x = u32(u32(x ^ (x >> u32(16))) * u32(0x7FEB352D))
    x = u32(u32(x ^ (x >> u32(15))) * u32(0x846CA68B))
    x = u32(x ^ (x >> u32(16)))
    return as_float(i32((x >> u32(9)) & u32(0x7FFF80) | u32(0x3F800040))) - f32(1.5)


@kernel
def encode_int8(
    base: Floats, local: Floats, step: int, largest: np.int32, block: int, payload: Bytes,
    stochastic: bool, first: np.uint32, key: np.uint32, next_key: np.uint32,
) -> int:  # fmt: skip
    blocks = (base.size + block - 1) // block
    codes, bad = payload[2 * blocks :], -1
    for i in range(blocks):
        start, stop = i * block, min(i * block + block, base.size)
        b, x, o = base[start:stop], local[start * step : start * step + stop - start], codes[start:stop]
        highest = highest_bits(b, x)
        if highest > largest and bad < 0:
            bad = start
        scale = scale_bits(highest, f32(127))
        inverse = reciprocal(scale)
        payload[2 * i], payload[2 * i + 1] = np.uint8(scale >> 16), np.uint8(scale >> 24)
        if stochastic:
            counter = u32(first + u32(start))
            for j in range(b.size):
                o[j] = np.uint8(as_int((b[j] - x[j]) * inverse + noise(u32(counter + u32(j)), first, key, next_key) + ROUND))
        else:
            for j in range(b.size):
                o[j] = np.uint8(as_int((b[j] - x[j]) * inverse + ROUND))
    return bad


@kernel
def encode_int4(
    base: Floats, local: Floats, step: int, largest: np.int32, block: int, payload: Bytes,
    stochastic: bool, first: np.uint32, key: np.uint32, next_key: np.uint32,
) -> int:  # fmt: skip
    blocks = (base.size + block - 1) // block
    codes, bad, inverse = payload[2 * blocks :], -1, f32(0)
    for i in range(blocks):
        start, stop = i * block, min(i * block + block, base.size)
        b, x = base[start:stop], local[start * step : start * step + stop - start]
        highest = highest_bits(b, x)
        if highest > largest and bad < 0:
            bad = start
        scale = scale_bits(highest, f32(7))
        inverse = reciprocal(scale)
        payload[2 * i], payload[2 * i + 1] = np.uint8(scale >> 16), np.uint8(scale >> 24)
        half = (stop - start + 1) // 2
        o, b2, x2 = codes[start // 2 : start // 2 + half], b[half:], x[half:]
        if stochastic:
            low, high = u32(first + u32(start)), u32(first + u32(start + half))
            for j in range(b2.size):
                noise_low = noise(u32(low + u32(j)), first, key, next_key)
                noise_high = noise(u32(high + u32(j)), first, key, next_key)
                code = as_int((b[j] - x[j]) * inverse + noise_low + ROUND) & 15
                o[j] = np.uint8(code | as_int((b2[j] - x2[j]) * inverse + noise_high + ROUND) << 4)
        else:
            for j in range(b2.size):
                code = as_int((b[j] - x[j]) * inverse + ROUND) & 15
                o[j] = np.uint8(code | as_int((b2[j] - x2[j]) * inverse + ROUND) << 4)
    if base.size % 2:  # the middle value of the last block has no partner: the low nibble of the last byte
        start = (blocks - 1) * block
        i = start + (base.size - start) // 2
        value = (base[i] - local[i if step else 0]) * inverse
        if stochastic:
            value += noise(u32(first + u32(i)), first, key, next_key)
        payload[payload.size - 1] = np.uint8(as_int(value + ROUND) & 15)
    return bad


# In all decoders: `payload` has been checked (`finite_*`, `scales_fit`). decode_* write, add_* add weight * value.


@kernel
def finite_fp32(payload: NDArray[np.int32]) -> bool:
    highest = i32(0)
    for j in range(payload.size):
        highest = max(highest, i32(payload[j] & SIGNLESS))
    return bool(highest < INFINITY)


@kernel
def finite_bf16(payload: NDArray[np.uint16]) -> bool:
    highest = np.uint16(0)
    for j in range(payload.size):
        highest = max(highest, np.uint16(payload[j] & np.uint16(0x7FFF)))
    return bool(highest < 0x7F80)


@kernel
def scales_fit(payload: Bytes, blocks: int, largest: int) -> bool:
    """Whether every scale is 0, or positive, normal and not above `largest`."""
    for i in range(blocks):
        scale = payload[2 * i] | payload[2 * i + 1] << 8
        if scale != 0 and not 0x0080 <= scale <= largest:
            return False
    return True


@kernel
def read_bf16(payload: Bytes, at: int) -> np.float32:
    return as_float(i32(payload[at] << 16 | payload[at + 1] << 24))


@kernel
def decode_bf16(payload: NDArray[np.uint16], out: Floats) -> None:
    for j in range(out.size):
        out[j] = as_float(i32(payload[j] << 16))


@kernel
def decode_int8(payload: Bytes, block: int, out: Floats) -> None:
    blocks = (out.size + block - 1) // block
    codes = payload[2 * blocks :].view(np.int8)
    for i in range(blocks):
        scale, stop = read_bf16(payload, 2 * i), min(i * block + block, out.size)
        o, c = out[i * block : stop], codes[i * block : stop]
        for j in range(o.size):
            o[j] = f32(c[j]) * scale


@kernel
def decode_int4(payload: Bytes, block: int, out: Floats) -> None:
    blocks = (out.size + block - 1) // block
    codes = payload[2 * blocks :].view(np.int8)
    for i in range(blocks):
        scale, start, stop = read_bf16(payload, 2 * i), i * block, min(i * block + block, out.size)
        half = (stop - start + 1) // 2
        low, high, c = out[start : start + half], out[start + half : stop], codes[start // 2 : start // 2 + half]
        for j in range(low.size):
            low[j] = f32(i32((c[j] & 15) ^ 8) - i32(8)) * scale
        for j in range(high.size):
            high[j] = f32(c[j] >> 4) * scale


@kernel
def add_fp32(payload: Floats, weight: np.float32, total: Floats) -> None:
    for j in range(total.size):
        total[j] += weight * payload[j]


@kernel
def add_bf16(payload: NDArray[np.uint16], weight: np.float32, total: Floats) -> None:
    for j in range(total.size):
        total[j] += weight * as_float(i32(payload[j] << 16))


@kernel
def add_int8(payload: Bytes, block: int, weight: np.float32, total: Floats) -> None:
    blocks = (total.size + block - 1) // block
    codes = payload[2 * blocks :].view(np.int8)
    for i in range(blocks):
        scale, stop = read_bf16(payload, 2 * i), min(i * block + block, total.size)
        o, c = total[i * block : stop], codes[i * block : stop]
        for j in range(o.size):
            o[j] += weight * (f32(c[j]) * scale)


@kernel
def add_int4(payload: Bytes, block: int, weight: np.float32, total: Floats) -> None:
    blocks = (total.size + block - 1) // block
    codes = payload[2 * blocks :].view(np.int8)
    for i in range(blocks):
        scale, start, stop = read_bf16(payload, 2 * i), i * block, min(i * block + block, total.size)
        half = (stop - start + 1) // 2
        low, high, c = total[start : start + half], total[start + half : stop], codes[start // 2 : start // 2 + half]
        for j in range(low.size):
            low[j] += weight * (f32(i32((c[j] & 15) ^ 8) - i32(8)) * scale)
        for j in range(high.size):
            high[j] += weight * (f32(c[j] >> 4) * scale)
