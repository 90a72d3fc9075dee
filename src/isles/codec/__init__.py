"""The codec room: pseudo-gradients to bytes and back. numba kernels, with a plain torch reference that tests hold them to."""

from isles.codec.codecs import Codec, decode, decode_accumulate, get_codec
from isles.codec.format import CHUNK_VALUES, Chunk, ChunkHeader, NonFiniteError, read_header

__all__ = ["CHUNK_VALUES", "Chunk", "ChunkHeader", "Codec", "NonFiniteError", "decode", "decode_accumulate", "get_codec", "read_header"]
