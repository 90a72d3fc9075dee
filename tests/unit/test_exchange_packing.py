"""Chunks come out of their packing as they went in, and what is no packing takes no memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from isles.codec import get_codec
from isles.errors import CodecError
from isles.exchange.packing import pack, unpack
from isles.spec import CodecTable


@given(st.binary(max_size=3000), st.integers(1, 50))
def test_what_is_packed_comes_out_the_same(data: bytes, times: int) -> None:
    body = data * times
    packed = pack(body)
    assert len(packed) <= len(body)
    assert (unpack(bytes(packed), len(body)) if len(packed) < len(body) else bytes(packed)) == body


@pytest.mark.parametrize(("codec", "least", "most"), [("int4", 0.8, 0.9), ("int8", 0.9, 0.96), ("bf16", 0.7, 0.8)])
def test_normally_distributed_values_take_fewer_bytes(codec: str, least: float, most: float) -> None:
    local = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32)
    body = get_codec(CodecTable(name=codec)).encode(np.zeros_like(local), local, offset=0)  # type: ignore[arg-type]
    assert least < len(pack(body)) / len(body) < most


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_what_does_not_unpack_is_a_codec_error(data: bytes, size: int) -> None:
    try:
        assert len(unpack(data, size)) == size
    except CodecError:
        return


def test_a_gigabyte_in_a_few_bytes_is_never_unpacked() -> None:
    honest = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 28))
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 28)))
    at = 5 if lying[4] & 0x20 else 6  # where a frame says how much it holds (RFC 8878, 3.1.1.1)
    lying[at : at + 4] = (1000).to_bytes(4, "little")
    assert zstandard.frame_content_size(bytes(lying)) == 1000
    tracemalloc.start()
    try:
        for bomb in (honest, silent, bytes(lying)):
            with pytest.raises(CodecError):
                unpack(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
