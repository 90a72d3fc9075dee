"""The codec room: pseudo-gradients to bytes and back, in one pass, the same bits everywhere.

    codec = get_codec(table)                        # a spec's codec table
    chunk = codec.encode(base, local, offset=...)   # d = base - local, at most CHUNK_VALUES values
    decode_accumulate(chunk, weight, total)         # total += weight * d
    values = decode(chunk)                          # a chunk says what it is

format: the bytes. codecs: what one calls. kernels, sparse: compiled loops, compiled at their first use. reference: the same in torch.
"""

from isles.codec.codecs import Codec, check, decode, decode_accumulate, get_codec
from isles.codec.errors import NonFiniteError, check_encodable
from isles.codec.format import CHUNK_VALUES, Chunk, ChunkHeader, read_header
from isles.codec.seeds import rounding_seed

__all__ = [
    "CHUNK_VALUES",
    "Chunk",
    "ChunkHeader",
    "Codec",
    "NonFiniteError",
    "check",
    "check_encodable",
    "decode",
    "decode_accumulate",
    "get_codec",
    "read_header",
    "rounding_seed",
]
