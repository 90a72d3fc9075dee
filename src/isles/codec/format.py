"""The chunk on the wire: a fixed header, then a payload whose length follows from the header alone.

Why a format of our own: a chunk comes from another machine, so everything about it must be known, and bounded, before memory
is taken for it. The header says which codec made it, with which parameters, for which values of the model; from that its
payload's length is a formula, and a chunk of any other length is refused. Nothing is ever unpickled. A CRC-32 guards the
header (a flipped bit in `offset` would otherwise put good values in the wrong place); the payload is hashed by whoever moves it.

Header, 32 bytes, little endian:

    0   4s   magic "isle"
    4   u16  version, 1
    6   u8   codec: 0 fp32, 1 bf16, 2 int8, 3 int4, 4 topk
    7   u8   0
    8   u16  block size (int8, int4: 32, 64, 128 or 256; topk: 4096; else 0)
    10  u16  k (topk: entries kept of a block, 1 to 4096; else 0)
    12  u32  count: values, 0 to CHUNK_VALUES
    16  u64  offset: position of the first value in the model's canonical flat layout
    24  u32  length of the payload in bytes
    28  u32  CRC-32 of bytes 0 to 27

Payload, little endian; a block is `block size` consecutive values, the last one may be shorter:

    fp32    count x f32
    bf16    count x the upper half of an f32
    int8    a bf16 scale a block, then count x i8; value = code * scale
    int4    a bf16 scale a block, then the blocks' codes, -7 to 7. Byte j of a block of n values holds value j in its low nibble and
            value j + ceil(n / 2) in its high one, so that both halves are read and written in straight runs; an odd n
            leaves the last high nibble 0
    topk    for each block: bf16 low level, bf16 high level, m positions of 12 bits in rising order, m codes of 2 bits
            (1: negative, 2: high level), each packed from the lowest bit up and filled to a whole byte with zeros
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from isles.errors import CodecError

CodecName = Literal["fp32", "bf16", "int8", "int4", "topk"]
Chunk = bytes | bytearray | memoryview | NDArray[np.uint8]

CHUNK_VALUES = 1 << 20  # values of a full chunk: 4 MiB of fp32, a fraction of a second on any line
SPARSE_BLOCK = 4096  # values of a top-k block: its positions take 12 bits
OFFSET_LIMIT = 1 << 56  # far above any model, low enough for signed 64-bit arithmetic
BLOCK_SIZES = (32, 64, 128, 256)
VERSION = 1
MAGIC = b"isle"
NAMES: tuple[CodecName, ...] = ("fp32", "bf16", "int8", "int4", "topk")  # by codec id

# Top codes of the block codecs, and their largest scales: low enough that every code a byte or a nibble can hold, -128 and -8
# included, decodes to a finite value.
TOP_CODE = {"int8": 127, "int4": 7}
LARGEST_SCALE = {"int8": 0x7BFF, "int4": 0x7DFF}  # as bf16 bits: 1.9921875 * 2**120 and 2**124

# The largest magnitude each codec carries, as fp32 bits. bf16 (and top-k, whose levels are bf16): what still rounds to a finite
# bf16. int8: 127 * 1.9921875 * 2**120 = 3.36e38; int4: 7 * 1.9921875 * 2**124 = 2.97e38.
LARGEST_BITS: dict[CodecName, int] = {
    "fp32": 0x7F7FFFFF,
    "bf16": 0x7F7F7FFF,
    "int8": 0x7F7D0200,
    "int4": 0x7F5F2000,
    "topk": 0x7F7F7FFF,
}

_HEADER = struct.Struct("<4sHBBHHIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


@dataclass(frozen=True)
class ChunkHeader:
    """What a chunk says about itself. Offsets and counts are in values, `payload_bytes` in bytes."""

    version: int
    codec: CodecName
    count: int
    offset: int
    block_size: int  # 0 for fp32 and bf16
    k: int  # 0 for all but topk
    payload_bytes: int

    @property
    def stop(self) -> int:
        """Position after the last value in the flat layout."""
        return self.offset + self.count


def kept(k: int, length: int) -> int:
    """Entries that top-k keeps of a block of `length` values: k of a full one, in proportion (rounded up) of a shorter one."""
    return min(k, -(-k * length // SPARSE_BLOCK))


def sparse_block_bytes(entries: int) -> int:
    """Bytes of a top-k block with `entries` entries: two levels, positions, codes."""
    return 4 + -(-12 * entries // 8) + -(-2 * entries // 8)


def payload_bytes(codec: CodecName, count: int, block_size: int, k: int) -> int:
    """Bytes of the payload of `count` values: what the header of such a chunk must say."""
    if codec == "fp32":
        return 4 * count
    if codec == "bf16":
        return 2 * count
    full, rest = divmod(count, block_size)
    if codec == "topk":
        return full * sparse_block_bytes(k) + (sparse_block_bytes(kept(k, rest)) if rest else 0)
    scales = 2 * (full + (rest > 0))
    return scales + (count if codec == "int8" else full * block_size // 2 + -(-rest // 2))


def pack_header(codec: CodecName, count: int, offset: int, block_size: int, k: int) -> bytes:
    """The 32 bytes that open a chunk. Raises CodecError when count or offset is out of bounds."""
    if not 0 <= count <= CHUNK_VALUES:
        raise CodecError(f"a chunk carries at most {CHUNK_VALUES:,} values, not {count:,}: encode the vector in slices")
    if not 0 <= offset <= OFFSET_LIMIT:
        raise CodecError(f"offset {offset} of a chunk is outside of 0 to 2**56: pass the position in the model's flat layout")
    length = payload_bytes(codec, count, block_size, k)
    fields = _HEADER.pack(MAGIC, VERSION, NAMES.index(codec), 0, block_size, k, count, offset, length)
    return fields + _CRC.pack(zlib.crc32(fields))


def read_header(chunk: Chunk) -> ChunkHeader:
    """Read and check the header of a chunk, and that the chunk is exactly as long as its header says. Takes no memory.

    Raises CodecError: not a chunk, another version, damaged, cut short, too long, or parameters out of bounds."""
    view = as_bytes(chunk)
    if view.nbytes < HEADER_BYTES:
        raise CodecError(f"a chunk of {view.nbytes} bytes is shorter than its {HEADER_BYTES}-byte header: fetch it again")
    magic, version, number, zero, block_size, k, count, offset, length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"this is not a chunk of isles: it opens with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise CodecError(
            f"the chunk has format version {version} and this isles reads {VERSION}: run the same isles everywhere"
        )
    if _CRC.unpack_from(view, _HEADER.size)[0] != zlib.crc32(view[: _HEADER.size]):
        raise CodecError("the chunk's header is damaged (its checksum does not match): fetch it again")
    if number >= len(NAMES) or zero != 0:
        raise CodecError(f"the chunk's codec, number {number}.{zero}, is unknown: run the same isles everywhere")
    codec = NAMES[number]
    _check_parameters(codec, block_size, k)
    if count > CHUNK_VALUES or offset > OFFSET_LIMIT:
        raise CodecError(
            f"the chunk claims {count:,} values at offset {offset:,}, more than a chunk may hold: refuse its sender"
        )
    expected = payload_bytes(codec, count, block_size, k)
    if length != expected:
        raise CodecError(
            f"the chunk claims {length:,} payload bytes where {count:,} values in {codec} take {expected:,}: refuse its sender"
        )
    if view.nbytes != HEADER_BYTES + length:
        state = "cut short" if view.nbytes < HEADER_BYTES + length else "too long"
        raise CodecError(f"the chunk is {state}, {view.nbytes:,} bytes instead of {HEADER_BYTES + length:,}: fetch it again")
    return ChunkHeader(version, codec, count, offset, block_size, k, length)


def _check_parameters(codec: CodecName, block_size: int, k: int) -> None:
    if codec == "topk":
        fits = block_size == SPARSE_BLOCK and 1 <= k <= SPARSE_BLOCK
    elif codec in TOP_CODE:
        fits = block_size in BLOCK_SIZES and k == 0
    else:
        fits = block_size == 0 and k == 0
    if not fits:
        raise CodecError(
            f"the chunk's parameters (block size {block_size}, k {k}) do not fit its codec {codec}: refuse its sender"
        )


def as_bytes(chunk: Chunk) -> memoryview:
    """A chunk as a flat view of its bytes, without a copy. Raises CodecError when it is no contiguous run of bytes."""
    try:
        return memoryview(cast(bytes, chunk)).cast("B")
    except (TypeError, ValueError):
        kind = type(chunk).__name__
        raise CodecError(f"a chunk must be bytes, or a contiguous buffer of bytes, not {kind}: copy it into bytes") from None
