"""The codecs again, in plain torch: what the compiled loops must do, written to be read.

Every function here gives the bytes of its compiled counterpart, bit for bit; tests hold the two against each other. Nothing in isles
calls this module. Read it to learn what a codec does, or use it as the template of an implementation elsewhere (another language, a
GPU). Blocks are rows of a matrix, the last one filled up with zeros.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.codec.errors import first_refused
from isles.codec.format import (
    HEADER_BYTES,
    LARGEST_BITS,
    SPARSE_BLOCK,
    TOP_CODE,
    Chunk,
    CodecName,
    as_bytes,
    kept,
    pack_header,
    read_header,
)
from isles.spec import CodecTable

_DEFAULT_BLOCK = {"int8": 128, "int4": 64}


def encode(
    table: CodecTable,
    base: Tensor,
    local: Tensor | None = None,
    *,
    offset: int = 0,
    seed: int = 0,
    residual: Tensor | None = None,
) -> bytes:
    """The chunk of d = base - local (or d = base). base, local, residual: fp32, shape [n]; the residual is updated in place.

    Raises NonFiniteError as `Codec.encode` does."""
    d = base.clone() if local is None else base - local
    block_size, k = 0, 0
    if table.name == "topk":
        assert residual is not None
        d = table.residual_decay * residual + d
        block_size, k = SPARSE_BLOCK, table.k
    elif table.name in TOP_CODE:
        block_size = table.block_size or _DEFAULT_BLOCK[table.name]
    if bool((_bits(d) & 0x7FFFFFFF > LARGEST_BITS[table.name]).any()):
        raise first_refused(d.numpy(), offset, table.name)
    if d.numel() == 0:
        return pack_header(table.name, 0, offset, block_size, k)
    if table.name == "fp32":
        payload = d.view(torch.uint8)
    elif table.name == "bf16":
        payload = d.to(torch.bfloat16).view(torch.uint8)  # to nearest-even
    elif table.name == "topk":
        assert residual is not None
        residual.copy_(d)
        payload = _encode_sparse(residual, k)
    else:
        noise = _noise(d.numel(), offset, seed) if table.rounding == "stochastic" else torch.zeros_like(d)
        payload = _encode_blocks(d, noise, table.name, block_size)
    return pack_header(table.name, d.numel(), offset, block_size, k) + payload.numpy().tobytes()


def decode(chunk: Chunk) -> Tensor:
    """The values of a sound chunk, fp32, shape [count]. Only the header is checked."""
    header = read_header(chunk)
    if header.count == 0:
        return torch.zeros(0)
    payload = torch.from_numpy(np.frombuffer(as_bytes(chunk), np.uint8)[HEADER_BYTES:].copy())
    if header.codec == "fp32":
        return payload.view(torch.float32)
    if header.codec == "bf16":
        return payload.view(torch.bfloat16).float()
    if header.codec == "topk":
        return _decode_sparse(payload, header.count, header.k)
    return _decode_blocks(payload, header.count, header.codec, header.block_size)


def decode_accumulate(chunk: Chunk, weight: float, accumulator: Tensor) -> None:
    """accumulator += float32(weight) * value. Two operations, so that torch does not fuse them."""
    product = torch.tensor(weight, dtype=torch.float32) * decode(chunk)
    accumulator.add_(product)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _rows(values: Tensor, width: int) -> Tensor:
    """Rows of `width` values, the last one filled up with zeros. Shape [ceil(n / width), width]."""
    return torch.nn.functional.pad(values, (0, -values.numel() % width)).view(-1, width)


def _bf16_up(values: Tensor) -> Tensor:
    """Non-negative fp32 values rounded up to bf16."""
    return (_bits(values) + 0xFFFF & -0x10000).view(torch.float32)


def _encode_blocks(d: Tensor, noise: Tensor, name: CodecName, block_size: int) -> Tensor:
    rows, top = _rows(d, block_size), torch.tensor(float(TOP_CODE[name]))
    absmax = rows.abs().amax(1)
    scale = _bf16_up(absmax / top)
    scale = torch.where(scale < 2.0**-126, torch.zeros(()), scale)
    inverse = 1 / scale
    above = inverse.double() * scale.double() > 1
    inverse = torch.where(above, (_bits(inverse) - 1).view(torch.float32), inverse)  # rounded down
    inverse = torch.where(scale == 0, torch.zeros(()), inverse)
    codes = torch.round(rows * inverse[:, None] + _rows(noise, block_size)).to(torch.int32)  # torch.round: to nearest-even
    scales = (_bits(scale) >> 16).to(torch.int16).view(torch.uint8)
    flat = codes.flatten()[: d.numel()]
    if name == "int8":
        return torch.cat([scales, flat.to(torch.int8).view(torch.uint8)])
    full = d.numel() // block_size
    packed = [_pack_nibbles(codes[:full], block_size), _pack_nibbles(flat[full * block_size :][None], d.numel() % block_size)]
    return torch.cat([scales, *(p.flatten() for p in packed)])


def _pack_nibbles(codes: Tensor, width: int) -> Tensor:
    half = -(-width // 2)
    high = torch.nn.functional.pad(codes[:, half:], (0, width % 2))
    return (codes[:, :half] & 15 | (high & 15) << 4).to(torch.uint8)


def _unpack_nibbles(packed: Tensor, width: int) -> Tensor:
    nibbles = torch.cat([packed & 15, packed >> 4], 1)[:, :width].to(torch.int32)
    return (nibbles ^ 8) - 8


def _decode_blocks(payload: Tensor, count: int, name: CodecName, block_size: int) -> Tensor:
    blocks = -(-count // block_size)
    scale = payload[: 2 * blocks].view(torch.bfloat16).float()
    codes = payload[2 * blocks :]
    if name == "int8":
        values = codes.view(torch.int8).float()
    else:
        full, rest = divmod(count, block_size)
        half = block_size // 2
        whole = _unpack_nibbles(codes[: full * half].view(full, half), block_size)
        short = _unpack_nibbles(codes[full * half :][None], rest)
        values = torch.cat([whole.flatten(), short.flatten()]).float()
    return (_rows(values, block_size) * scale[:, None]).flatten()[:count]


def _noise(count: int, offset: int, seed: int) -> Tensor:
    """Odd multiples of 2**-17 in (-1/2, 1/2): the hash lowbias32 of (low half of the position) ^ (splitmix64 of seed and high half)."""
    position = torch.arange(offset, offset + count)
    keys = {high: _key(seed, high) for high in range(offset >> 32, (offset + count >> 32) + 1)}
    key = torch.zeros(count, dtype=torch.int64)
    for high, value in keys.items():
        key[position >> 32 == high] = value
    x = (position & 0xFFFFFFFF) ^ key
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    x = x ^ x >> 16
    return ((x >> 16).float() + 0.5) / 65536 - 0.5


def _key(seed: int, high: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15 * (high + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 32


def _encode_sparse(e: Tensor, k: int) -> Tensor:
    """Encodes e and takes what is sent out of it."""
    return torch.cat([_encode_sparse_block(block, kept(k, block.numel())) for block in torch.split(e, SPARSE_BLOCK)])


def _encode_sparse_block(e: Tensor, entries: int) -> Tensor:
    magnitude = e.abs()
    largest = magnitude.sort(descending=True, stable=True).indices[:entries]  # stable: of equal ones the lowest position
    positions = largest.sort().values
    sent = magnitude[positions].double()
    mean = _sum(sent) / entries
    over = sent >= mean
    low = _sum(sent[~over]) / (~over).sum() if bool((~over).any()) else torch.zeros(())
    high = _sum(sent[over]) / over.sum()
    levels = torch.stack([low.float(), high.float()]).to(torch.bfloat16)
    negative = e[positions].signbit()
    value = torch.where(over, levels[1].float(), levels[0].float())
    e[positions] -= torch.where(negative, -value, value)
    codes = negative.long() + 2 * over.long()
    return torch.cat([levels.view(torch.uint8), _pack_bits(positions, 12), _pack_bits(codes, 2)])


def _sum(values: Tensor) -> Tensor:
    """In order: torch.sum adds in an order of its own."""
    return values.cumsum(0)[-1]


def _pack_bits(numbers: Tensor, width: int) -> Tensor:
    """Numbers of `width` bits, one after the other from the lowest bit up, filled to a whole byte with zeros."""
    bits = (numbers[:, None] >> torch.arange(width) & 1).flatten()
    return (_rows(bits, 8) << torch.arange(8)).sum(1).to(torch.uint8)


def _unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    bits = (packed[:, None].long() >> torch.arange(8) & 1).flatten()[: count * width]
    return (bits.view(count, width) << torch.arange(width)).sum(1)


def _decode_sparse(payload: Tensor, count: int, k: int) -> Tensor:
    values, at = torch.zeros(count), 0
    for block in torch.split(values, SPARSE_BLOCK):
        entries = kept(k, block.numel())
        ends = [at + 4, at + 4 + -(-12 * entries // 8), at + 4 + -(-12 * entries // 8) + -(-2 * entries // 8)]
        levels = payload[at : ends[0]].clone().view(torch.bfloat16).float()  # a copy lies at an even address
        positions = _unpack_bits(payload[ends[0] : ends[1]], 12, entries)
        codes = _unpack_bits(payload[ends[1] : ends[2]], 2, entries)
        level = torch.where(codes >= 2, levels[1], levels[0])
        block[positions] += torch.where(codes % 2 == 1, -level, level)
        at = ends[2]
    return values
