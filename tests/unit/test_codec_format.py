"""Promises of the chunk format: version 1 never changes, sizes are formulas, and nothing unsound gets past the header."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from isles.codec import CHUNK_VALUES, decode, decode_accumulate, get_codec, read_header
from isles.codec.format import HEADER_BYTES, NAMES, kept, pack_header, payload_bytes
from isles.errors import CodecError
from isles.spec import CodecTable

VALUES = np.array([1.0, -2.0, 0.5, 127.0, -0.25, 3.0, -63.5], np.float32)
GOLDEN = {
    "fp32": "0000803f000000c00000003f0000fe42000080be0000404000007ec2",
    "bf16": "803f00c0003ffe4280be40407ec2",
    "int8": "803f" + "01fe007f0003c0",  # 0.5 goes to 0 and -63.5 to -64: halves to the even code
    "int4": "9241"
    + "0000d007",  # scale 18.25, the bf16 above 127 / 7; byte 2 is 0.5 (0) and -63.5 (-3), byte 3 is 127 (7) alone
}


def chunk_of(name: str, values: np.ndarray = VALUES, **table: object) -> bytes:
    codec = get_codec(CodecTable(name=name, **table))
    residual = np.zeros_like(values) if codec.needs_residual else None
    return bytes(codec.encode(values, offset=77, residual=residual))


def forged(position: int, layout: str, value: int) -> bytes:
    """An int8 chunk with one header field replaced and the checksum made to fit, as an attacker would."""
    data = bytearray(chunk_of("int8"))
    struct.pack_into(layout, data, position, value)
    struct.pack_into("<I", data, 28, zlib.crc32(data[:28]))
    return bytes(data)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_version_1_bytes_are_pinned(name: str) -> None:
    chunk = chunk_of(name)
    assert chunk[HEADER_BYTES:].hex() == GOLDEN[name]


@pytest.mark.parametrize(("name", "payload"), [("int8", "023c7e06fa1be50975"), ("int4", "133ef7117f01")])
def test_the_noise_of_version_1_is_pinned(name: str, payload: str) -> None:
    """Seven values across position 2**32 with a seed above 32 bits: the hash, both of its keys, and what the noise does to codes."""
    values = np.array([7, 0.3, -0.3, 1.5, -1.5, 0.5, 6.5], np.float32) / np.float32(7)
    codec = get_codec(CodecTable(name=name, rounding="stochastic"))
    chunk = bytes(codec.encode(values, offset=2**32 - 4, seed=2**40 + 12345))
    assert chunk[HEADER_BYTES:].hex() == payload


def test_topk_bytes_are_pinned() -> None:
    values = np.array([0, 1, 0, -4, 2, -2, 0, 0], np.float32).repeat(512)  # a block; k = 3 keeps the first three -4
    chunk = chunk_of("topk", values, k=3)
    positions = (1536 | 1537 << 12 | 1538 << 24).to_bytes(5, "little")
    codes = bytes([0b111111])  # all high (the mean is 4), all negative
    assert chunk[HEADER_BYTES:] == bytes.fromhex("00008040") + positions + codes


def test_topk_levels_are_the_means_of_the_upper_and_the_lower_part() -> None:
    values = np.zeros(4096, np.float32)
    values[[5, 9, 11, 4095]] = [8, -1, -3, 4]  # mean 4: high is (8 + 4) / 2, low (1 + 3) / 2
    decoded = decode(chunk_of("topk", values, k=4))
    expected = np.zeros(4096, np.float32)
    expected[[5, 9, 11, 4095]] = [6, -2, -2, 6]
    np.testing.assert_array_equal(decoded, expected)


def test_the_header_says_what_the_chunk_is() -> None:
    header = read_header(chunk_of("int4", block_size=32))
    assert (header.version, header.codec, header.count, header.offset, header.block_size, header.k) == (1, "int4", 7, 77, 32, 0)
    assert header.payload_bytes == 2 + 4 and header.stop == 84
    assert read_header(chunk_of("topk", k=9)).k == 9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 8200])
def test_encoded_size_is_exact(name: str, count: int) -> None:
    codec = get_codec(CodecTable(name=name))
    residual = np.zeros(count, np.float32) if codec.needs_residual else None
    assert len(codec.encode(np.ones(count, np.float32), residual=residual)) == codec.encoded_size(count)


def test_a_short_topk_block_keeps_its_share_and_at_least_one() -> None:
    assert [kept(64, n) for n in (1, 64, 65, 2048, 4096)] == [1, 1, 2, 32, 64]
    assert kept(4096, 3) == 3


def test_compression_at_full_chunks() -> None:
    def factor(name: str) -> float:
        return 4 * CHUNK_VALUES / get_codec(CodecTable(name=name)).encoded_size(CHUNK_VALUES)

    assert factor("bf16") > 1.999
    assert factor("int8") > 3.93
    assert factor("int4") > 7.52
    assert factor("topk") > 141


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda c: c[:0], "shorter than its 32-byte header"),
        (lambda c: c[:31], "shorter than its 32-byte header"),
        (lambda c: b"gzip" + c[4:], "not a chunk of isles"),
        (lambda c: c[:4] + b"\x02\x00" + c[6:], "format version 2"),
        (lambda c: c[:16] + b"\x01" + c[17:], "checksum does not match"),
        (lambda c: c[:-1], "cut short"),
        (lambda c: c + b"\0", "too long"),
        (lambda _: forged(6, "<B", 5), "codec, number 5.0, is unknown"),
        (lambda _: forged(7, "<B", 1), "unknown"),
        (lambda _: forged(8, "<H", 100), "do not fit its codec"),
        (lambda _: forged(8, "<H", 0), "do not fit its codec"),
        (lambda _: forged(10, "<H", 1), "do not fit its codec"),
        (lambda _: forged(12, "<I", 2**32 - 1), "more than a chunk may hold"),
        (lambda _: forged(12, "<I", 8), "refuse its sender"),
        (lambda _: forged(16, "<Q", 2**63), "more than a chunk may hold"),
        (lambda _: forged(24, "<I", 2**31), "refuse its sender"),
    ],
)
def test_an_unsound_chunk_is_refused_in_one_sentence(broken: Callable[[bytes], bytes], says: str) -> None:
    chunk = broken(chunk_of("int8"))
    for read in (read_header, decode, lambda c: decode_accumulate(c, 1.0, np.zeros(7, np.float32))):
        with pytest.raises(CodecError, match=says) as caught:
            read(chunk)
        assert "\n" not in str(caught.value)


def test_a_header_cannot_ask_for_memory() -> None:
    """The largest count that a header may claim is a chunk's, 4 MiB of fp32, however small the payload."""
    with pytest.raises(CodecError):
        read_header(forged(12, "<I", CHUNK_VALUES + 1))
    with pytest.raises(CodecError, match="at most 1,048,576 values"):
        pack_header("fp32", CHUNK_VALUES + 1, 0, 0, 0)
    assert payload_bytes("topk", CHUNK_VALUES, 4096, 1) < 2000


@pytest.mark.parametrize("chunk", ["text", 7, None, [1, 2], np.zeros((64, 2), np.uint8)[:, 0]])
def test_what_is_no_bytes_is_refused(chunk: object) -> None:
    with pytest.raises(CodecError, match="a chunk must be bytes"):
        decode(chunk)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "at", "bad"),
    [
        ("fp32", 0, "0000c07f"),  # NaN
        ("fp32", 24, "000080ff"),  # -inf
        ("bf16", 2, "807f"),  # inf
        ("bf16", 12, "c0ff"),  # NaN
        ("int8", 0, "807f"),  # an infinite scale
        ("int8", 0, "c17f"),  # NaN
        ("int8", 0, "80bf"),  # negative
        ("int8", 0, "0100"),  # denormal
        ("int8", 0, "007c"),  # 128 codes of it are infinite
        ("int4", 0, "007e"),
        ("int4", 0, "807f"),
        ("topk", 2, "807f"),
        ("topk", 2, "80bf"),
        ("topk", 0, "ffff"),
    ],
)
def test_values_that_are_not_finite_do_not_come_out_of_a_payload(name: str, at: int, bad: str) -> None:
    chunk = bytearray(chunk_of(name))
    good, total = bytes(chunk), np.arange(7, dtype=np.float32)
    at += HEADER_BYTES
    chunk[at : at + len(bad) // 2] = bytes.fromhex(bad)
    for read in (decode, lambda c: decode_accumulate(c, 1.0, total)):
        with pytest.raises(CodecError, match="not finite or not in their place"):
            read(chunk)
    np.testing.assert_array_equal(total, np.arange(7))
    assert np.isfinite(decode(good)).all()


@pytest.mark.parametrize("positions", [(3, 3), (4, 3), (0, 8), (0, 4095)])
def test_topk_positions_must_rise_and_lie_inside(positions: tuple[int, int]) -> None:
    chunk = bytearray(chunk_of("topk", VALUES.repeat(2)[:8], k=1024))  # 8 values keep 2
    at = HEADER_BYTES + 4
    chunk[at : at + 3] = (positions[0] | positions[1] << 12).to_bytes(3, "little")
    with pytest.raises(CodecError, match="not in their place"):
        decode(chunk)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_largest_scale_and_code_still_decode_to_a_finite_value(name: str) -> None:
    chunk = bytearray(chunk_of(name))
    largest = {"int8": "ff7b", "int4": "ff7d"}[name]
    chunk[HEADER_BYTES : HEADER_BYTES + 2] = bytes.fromhex(largest)
    chunk[HEADER_BYTES + 2 :] = {"int8": b"\x80", "int4": b"\x88"}[name] * (len(chunk) - HEADER_BYTES - 2)
    assert np.isfinite(decode(chunk)).all()
