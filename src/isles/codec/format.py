"""The chunk format: a versioned header that describes the payload behind it.

    offset  size  field
    0       4     magic "ISLC"
    4       1     version (1)
    5       1     codec number
    6       2     parameter: block size (int8, int4), k (topk), 0 otherwise
    8       4     count: values in the chunk
    12      4     payload length in bytes
    16      8     offset: position of the first value in the canonical flat layout

All integers are little-endian. The payload's length follows from codec, parameter and count, so a header that says anything else is
refused before a byte is allocated. What round and which cluster a chunk belongs to is the exchange's business, not the format's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from isles.errors import CodecError

MAGIC = b"ISLC"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIQ")
CHUNK_VALUES = 1 << 20  # values a chunk: 4 MiB of fp32, half a MiB of int4; a lost connection costs one chunk
MAX_VALUES = 1 << 24  # most values a header may announce, so that a forged one cannot ask for memory
TOPK_BLOCK = 4096  # entries that share a selection; positions are 12 bits (SparseLoCo, arXiv 2508.15706)

NUMBERS = {"fp32": 1, "bf16": 2, "int8": 3, "int4": 4, "topk": 5}
NAMES = {number: name for name, number in NUMBERS.items()}
BLOCK_SIZES = (32, 64, 128, 256)

Chunk = bytes | bytearray | memoryview


class NonFiniteError(CodecError):
    """A value that cannot be sent: NaN, infinity, or too large for the codec. index: its position in the flat layout."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(f"value {index} of the flat layout is {what} and cannot be encoded; the contribution must be left out")
        self.index = index


@dataclass(frozen=True)
class ChunkHeader:
    """What a chunk says of itself."""

    codec: str
    parameter: int
    count: int
    offset: int
    payload: int  # bytes
    version: int = VERSION

    def pack_into(self, buffer: bytearray | memoryview) -> None:
        HEADER.pack_into(buffer, 0, MAGIC, self.version, NUMBERS[self.codec], self.parameter, self.count, self.payload, self.offset)


def blocks(count: int, size: int) -> int:
    """Blocks of `size` that hold `count` values."""
    return -(-count // size)


def topk_kept(length: int, k: int) -> int:
    """Entries kept of a block of `length`: k of a whole block, as many in proportion of a shorter one, at least one."""
    return min(k, -(-k * length // TOPK_BLOCK)) if length else 0


def topk_entries(count: int, k: int) -> int:
    """Entries kept in a chunk of `count` values."""
    whole, rest = divmod(count, TOPK_BLOCK)
    return whole * topk_kept(TOPK_BLOCK, k) + topk_kept(rest, k)


def payload_size(codec: str, parameter: int, count: int) -> int:
    """Exact payload bytes of `count` values."""
    if codec == "fp32":
        return 4 * count
    if codec == "bf16":
        return 2 * count
    if codec == "int8":
        return 2 * blocks(count, parameter) + count
    if codec == "int4":
        whole, rest = divmod(count, parameter)
        return 2 * blocks(count, parameter) + whole * (parameter // 2) + min(rest, parameter // 2)  # of a short block, the bytes in use
    entries = topk_entries(count, parameter)
    return 4 * blocks(count, TOPK_BLOCK) + (entries * 12 + 7) // 8 + (entries * 2 + 7) // 8


def read_header(chunk: Chunk) -> ChunkHeader:
    """The header of a chunk, everything in it checked against the chunk's real length. Raises CodecError in one sentence."""
    view = memoryview(chunk).cast("B")
    if len(view) < HEADER.size:
        raise CodecError(f"a chunk of {len(view)} bytes is shorter than its header of {HEADER.size}; it was cut on the way")
    magic, version, number, parameter, count, payload, offset = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CodecError("these bytes are no chunk: they do not begin with the mark ISLC")
    if version != VERSION:
        raise CodecError(f"the chunk is of format version {version}, this isles reads version {VERSION}; update the older side")
    codec = NAMES.get(number)
    if codec is None:
        raise CodecError(f"the chunk names codec number {number}, which this isles does not know; update the older side")
    _check_parameter(codec, parameter)
    if count > MAX_VALUES or offset + count > 1 << 63:
        raise CodecError(f"the chunk announces {count} values from position {offset} on; {MAX_VALUES} is the most a chunk holds")
    expected = payload_size(codec, parameter, count)
    if payload != expected or len(view) != HEADER.size + payload:
        raise CodecError(
            f"the chunk has {len(view) - HEADER.size} bytes of payload and announces {payload}, {count} values of {codec} need {expected}; it was cut or altered"
        )
    return ChunkHeader(codec, parameter, count, offset, payload, version)


def _check_parameter(codec: str, parameter: int) -> None:
    if codec in ("int8", "int4"):
        fits = parameter in BLOCK_SIZES
    else:
        fits = 1 <= parameter <= TOPK_BLOCK if codec == "topk" else parameter == 0
    if not fits:
        raise CodecError(f"the chunk's parameter {parameter} does not fit its codec {codec}; it was altered")
