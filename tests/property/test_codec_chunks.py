"""Whatever arrives as a chunk: it decodes to finite values, or it is refused with CodecError; it never crashes, hangs or takes memory."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.codec import CHUNK_VALUES, decode, decode_accumulate, get_codec, read_header
from isles.codec.format import HEADER_BYTES, payload_bytes
from isles.errors import CodecError
from isles.spec import CodecTable

NAMES = ("fp32", "bf16", "int8", "int4", "topk")


def outcome(chunk: bytes) -> np.ndarray | None:
    """The values, or None when the chunk is refused. A refused chunk must leave an accumulator alone."""
    try:
        count = read_header(chunk).count
    except CodecError as error:
        assert "\n" not in str(error)
        count = 5
    total = np.ones(count, np.float32)
    try:
        values = decode(chunk)
    except CodecError as error:
        assert "\n" not in str(error)
        _refused(lambda: decode_accumulate(chunk, 1.0, total))
        assert (total == 1).all()
        return None
    with np.errstate(over="ignore"):
        expected = np.ones(count, np.float32) + values
    decode_accumulate(chunk, 1.0, total)
    np.testing.assert_array_equal(total, expected)
    return values


def _refused(call: Callable[[], None]) -> None:
    try:
        call()
    except CodecError:
        return
    raise AssertionError("decode refused the chunk, decode_accumulate did not")


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    table = CodecTable(
        name=draw(st.sampled_from(NAMES)),
        block_size=draw(st.sampled_from([None, 32, 256])),
        k=draw(st.sampled_from([1, 64, 4096])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(draw(st.sampled_from([0, 1, 5, 64, 200, 5000])), dtype=np.float32)
    codec = get_codec(table)
    residual = np.zeros_like(values) if codec.needs_residual else None
    return bytes(codec.encode(values, offset=draw(st.integers(0, 2**40)), residual=residual))


@settings(max_examples=1000)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert outcome(data) is None


@settings(max_examples=1000)
@given(chunks(), st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_the_header_is_noticed(chunk: bytes, bit: int) -> None:
    broken = bytearray(chunk)
    broken[bit // 8] ^= 1 << bit % 8
    assert outcome(bytes(broken)) is None


@settings(max_examples=1000)
@given(chunks(), st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_flipped_bits_of_the_payload_give_finite_values_or_are_refused(chunk: bytes, bits: list[int]) -> None:
    broken = bytearray(chunk)
    for bit in bits:
        if len(chunk) > HEADER_BYTES:
            at = HEADER_BYTES * 8 + bit % ((len(chunk) - HEADER_BYTES) * 8)
            broken[at // 8] ^= 1 << at % 8
    values = outcome(bytes(broken))
    assert values is None or np.isfinite(values).all()


@settings(max_examples=500)
@given(chunks(), st.integers(0, 10**6), st.binary(min_size=1, max_size=9))
def test_a_cut_or_lengthened_chunk_is_refused(chunk: bytes, cut: int, more: bytes) -> None:
    assert outcome(chunk[: cut % len(chunk)]) is None
    assert outcome(chunk + more) is None


@settings(max_examples=1000)
@given(
    number=st.integers(0, 6), zero=st.sampled_from([0, 0, 0, 1]), block=st.sampled_from([0, 32, 64, 128, 256, 4096, 1, 65535]),
    k=st.sampled_from([0, 1, 64, 4096, 4097, 65535]), count=st.one_of(st.integers(0, 300), st.sampled_from([CHUNK_VALUES, 2**32 - 1])),
    offset=st.one_of(st.integers(0, 2**56), st.integers(0, 2**64 - 1)), seed=st.integers(0, 2**32), honest=st.booleans(),
)  # fmt: skip
def test_a_forged_header_with_a_good_checksum_takes_no_memory_and_gives_no_bad_values(
    number: int, zero: int, block: int, k: int, count: int, offset: int, seed: int, honest: bool
) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(0, 1000))
    if honest and number < 5 and block and count < 1000:
        length = payload_bytes(NAMES[number], count, block, k)  # type: ignore[arg-type]
    fields = struct.pack("<4sHBBHHIQI", b"isle", 1, number, zero, block, k, count, offset, length)
    chunk = fields + struct.pack("<I", zlib.crc32(fields)) + rng.bytes(min(length, 10_000))
    tracemalloc.start()
    try:
        values = outcome(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert values is None or (values.size == count and np.isfinite(values).all())
    assert peak < 8 * 4 * max(count, 1) + 500_000 if values is not None else peak < 500_000
