"""Promises of the codecs: what they refuse, what they leave alone, how exact they are, and how they are compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import isles
from isles.codec import CHUNK_VALUES, Codec, NonFiniteError, decode, decode_accumulate, get_codec, kernels, sparse
from isles.errors import CodecError
from isles.spec import CodecTable

Floats = NDArray[np.float32]
NAMES = ("fp32", "bf16", "int8", "int4", "topk")
BELOW_BF16_OVERFLOW = np.nextafter(np.float32((2 - 2.0**-8) * 2.0**127), np.float32(0))  # the tie itself rounds to infinity
LARGEST = {
    "fp32": np.finfo(np.float32).max,
    "bf16": BELOW_BF16_OVERFLOW,
    "int8": np.float32(127 * 255 / 128 * 2.0**120),
    "int4": np.float32(7 * 255 / 128 * 2.0**124),
    "topk": BELOW_BF16_OVERFLOW,
}


def codec_of(name: str, **table: object) -> Codec:
    return get_codec(CodecTable(name=name, **table))


def residual_for(codec: Codec, count: int) -> Floats | None:
    return np.zeros(count, np.float32) if codec.needs_residual else None


def gaussian(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 700, 4099])
def test_a_value_that_is_not_finite_is_named_by_its_position(name: str, bad: float, at: int) -> None:
    codec, base = codec_of(name), gaussian(4100)
    base[at] = bad
    base[4099] = np.nan
    with pytest.raises(NonFiniteError, match=f"position {1000 + at} of the flat layout") as caught:
        codec.encode(base, gaussian(4100, 1), offset=1000, residual=residual_for(codec, 4100))
    assert caught.value.index == 1000 + at
    assert isinstance(caught.value, CodecError)


@pytest.mark.parametrize("name", NAMES)
def test_a_difference_that_overflows_is_refused(name: str) -> None:
    codec = codec_of(name)
    base, local = np.zeros(200, np.float32), np.zeros(200, np.float32)
    base[150], local[150] = 3e38, -3e38
    with pytest.raises(NonFiniteError) as caught:
        codec.encode(base, local, residual=residual_for(codec, 200))
    assert caught.value.index == 150


@pytest.mark.parametrize("name", NAMES)
def test_a_finite_value_is_carried_or_refused_but_never_becomes_infinite(name: str) -> None:
    codec = codec_of(name)
    limit = LARGEST[name]
    for value in (limit, -limit):
        chunk = codec.encode(np.array([1, value], np.float32), residual=residual_for(codec, 2))
        assert np.isfinite(decode(chunk)).all()
    if name != "fp32":
        with pytest.raises(NonFiniteError, match="up to") as caught:
            codec.encode(np.array([1, np.nextafter(limit, np.float32(np.inf))], np.float32), residual=residual_for(codec, 2))
        assert caught.value.index == 1


def test_a_refused_contribution_leaves_the_residual_alone() -> None:
    codec, residual = codec_of("topk"), gaussian(9000)
    before, base = residual.copy(), gaussian(9000, 1)
    base[8999] = np.nan
    with pytest.raises(NonFiniteError):
        codec.encode(base, residual=residual)
    np.testing.assert_array_equal(residual, before)


def test_a_residual_that_grew_beyond_bf16_is_refused_not_sent_as_infinity() -> None:
    residual = np.full(10, 3e38, np.float32)
    with pytest.raises(NonFiniteError) as caught:
        codec_of("topk", residual_decay=1.0).encode(np.full(10, 1e38, np.float32), offset=5, residual=residual)
    assert caught.value.index == 5


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_error_is_at_most_one_step_of_its_block(name: str, rounding: str) -> None:
    """Half a step to nearest, one step stochastically; a step is absmax / 127 (or 7) and at most one bf16 rounding (1/128) more."""
    values = gaussian(10_000) * np.float32(1e-3)
    block = {"int8": 128, "int4": 64}[name]
    error = np.abs(decode(codec_of(name, rounding=rounding).encode(values)) - values)
    for start in range(0, values.size, block):
        part = slice(start, start + block)
        step = np.abs(values[part]).max() / {"int8": 127, "int4": 7}[name] * (1 + 1 / 128)
        assert error[part].max() <= step * (0.5 if rounding == "nearest" else 1.0) * 1.0001


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_block_too_small_for_a_normal_scale_becomes_zeros_within_the_documented_bound(name: str) -> None:
    top = {"int8": 127, "int4": 7}[name]
    bound = np.float32(top * 2.0**-126)
    below, at = np.full(64, np.nextafter(bound, np.float32(0)) * np.float32(0.99), np.float32), np.full(64, bound, np.float32)
    assert not decode(codec_of(name).encode(below)).any()
    np.testing.assert_array_equal(decode(codec_of(name).encode(at)), at)
    tiny = np.full(64, 1e-45, np.float32)
    assert not decode(codec_of(name).encode(tiny)).any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_stochastic_rounding_is_right_on_average_and_nearest_is_not(name: str) -> None:
    top = {"int8": 127, "int4": 7}[name]
    values = np.full(64 * 2000, 0.3, np.float32)
    values[::64] = top  # scale 1: 0.3 lies between the codes 0 and 1
    small = np.arange(values.size) % 64 != 0
    stochastic = decode(codec_of(name, rounding="stochastic", block_size=64).encode(values, seed=3))[small]
    assert set(np.unique(stochastic)) == {0.0, 1.0}
    assert abs(stochastic.mean() - 0.3) < 5 * np.sqrt(0.21 / stochastic.size)
    assert not decode(codec_of(name, block_size=64).encode(values))[small].any()


def test_stochastic_rounding_depends_on_seed_and_position_not_on_how_the_vector_is_cut() -> None:
    codec, values = codec_of("int8", rounding="stochastic"), gaussian(1024)
    start = 2**32 - 300  # the second half lies past 2**32
    whole = decode(codec.encode(values, offset=start, seed=1))
    halves = [decode(codec.encode(values[i : i + 512], offset=start + i, seed=1)) for i in (0, 512)]
    np.testing.assert_array_equal(whole, np.concatenate(halves))
    assert (decode(codec.encode(values, offset=start, seed=2)) != whole).mean() > 0.2
    assert (decode(codec.encode(values, offset=start + 1, seed=1)) != whole).mean() > 0.2
    low = decode(codec.encode(values, offset=0, seed=1))
    assert (decode(codec.encode(values, offset=2**32, seed=1)) != low).mean() > 0.2


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_largest_value_of_a_block_never_leaves_the_codes(name: str) -> None:
    """Every position has its own noise and there are 65,536 of them, so a chunk of nothing but the largest value meets all.
    1 / 1.3046875 in fp32, rounded to nearest, is too large: it makes the value 127.00001. Rounded down it makes it 126.99999, which
    one position in 65,536 may round to 126."""
    top = {"int8": 127, "int4": 7}[name]
    for scale in (1.0, 1.3046875, 1.9921875):
        values = np.full(CHUNK_VALUES, top * scale, np.float32)
        codes = decode(codec_of(name, rounding="stochastic").encode(values)) / np.float32(scale)
        assert codes.max() == top and codes.min() >= top - 1
        assert (codes == top).mean() > 1 - 1e-4


def test_a_scale_is_never_below_its_share_of_the_largest_value() -> None:
    """For every bf16 scale s: a block whose largest value is the fp32 just above 127 s takes the next scale."""
    scales = np.float32(1) + np.arange(128, dtype=np.float32) / np.float32(128)
    for name, top in (("int8", 127), ("int4", 7)):
        values = np.nextafter(np.float32(top) * scales, np.float32(np.inf)).repeat(32)
        chunk = codec_of(name, block_size=32).encode(values)
        stored = np.frombuffer(chunk, np.uint16, offset=32, count=128).astype(np.uint32) << 16
        np.testing.assert_array_equal(stored.view(np.float32), np.append(scales[1:], np.float32(2)))


@pytest.mark.parametrize(
    ("name", "rounding"),
    [("bf16", "nearest"), ("int8", "nearest"), ("int8", "stochastic"), ("int4", "nearest"), ("int4", "stochastic")],
)
def test_an_average_of_two_to_eight_clusters_is_unbiased(name: str, rounding: str) -> None:
    """|mean error| under 1e-4 sigma. Four standard errors of the test itself are 1e-4 in the worst case (int4, stochastic, 2 clusters:
    0.15 sigma over sqrt(2 * 2**24)), so that a bias of 2e-4 fails it and chance, whose seed is fixed, does not."""
    rng, part, rounds = np.random.default_rng(5), CHUNK_VALUES, 16
    errors = np.zeros(8)
    for seed in range(8):
        for start in range(0, rounds * part, part):
            values = rng.standard_normal(part, dtype=np.float32)
            decoded = decode(codec_of(name, rounding=rounding).encode(values, offset=start, seed=seed))
            errors[seed] += np.subtract(decoded, values).sum(dtype=np.float64)
    means = np.cumsum(errors)[1:] / np.arange(2, 9) / (rounds * part)
    assert np.abs(means).max() < 1e-4


def test_error_feedback_loses_nothing() -> None:
    """What was sent and what remains add up to what was put in, with beta 1, to fp32 rounding."""
    codec, residual = codec_of("topk", residual_decay=1.0), np.zeros(5000, np.float32)
    put, sent = np.zeros(5000, np.float64), np.zeros(5000, np.float64)
    for i in range(50):
        d = gaussian(5000, i)
        put += d
        sent += decode(codec.encode(d, residual=residual))
    np.testing.assert_allclose(sent + residual, put, atol=1e-3)
    assert np.count_nonzero(sent) > 2000


def test_topk_takes_the_lowest_positions_of_equal_magnitudes() -> None:
    values = np.tile(np.array([1, -1], np.float32), 4096)
    decoded = decode(codec_of("topk", k=10).encode(values, residual=np.zeros(8192, np.float32)))
    expected = np.zeros(8192, np.float32)
    expected[:10], expected[4096:4106] = values[:10], values[:10]
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_takes_no_memory_the_size_of_its_input(name: str) -> None:
    codec = codec_of(name)
    base, local = gaussian(CHUNK_VALUES), gaussian(CHUNK_VALUES, 1)
    residual, out, total = residual_for(codec, base.size), bytearray(codec.encoded_size(base.size)), np.zeros_like(base)
    decode_accumulate(codec.encode(base, local, residual=residual, out=out), 1.0, total)  # compiles
    tracemalloc.start()
    decode_accumulate(codec.encode(base, local, residual=residual, out=out), 1.0, total)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_at_any_address_gives_and_takes_the_same_bytes(name: str) -> None:
    codec, values = codec_of(name), gaussian(777)
    chunk = bytes(codec.encode(values, residual=residual_for(codec, 777)))
    for shift in range(1, 5):
        buffer = bytearray(len(chunk) + 64)
        out = memoryview(buffer)[shift:]
        written = codec.encode(values, residual=residual_for(codec, 777), out=out)
        assert bytes(written) == chunk == bytes(buffer[shift : shift + len(chunk)])
        np.testing.assert_array_equal(decode(written), decode(chunk))
        total, straight = np.ones(777, np.float32), np.ones(777, np.float32)
        decode_accumulate(written, 0.5, total)
        decode_accumulate(chunk, 0.5, straight)
        np.testing.assert_array_equal(total, straight)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"base": np.zeros(8)}, "base must be a contiguous one-dimensional float32 numpy array, not float64"),
        ({"base": [1.0, 2.0]}, "not list"),
        ({"base": np.zeros((2, 4), np.float32)}, r"not float32\[2, 4\]"),
        ({"base": np.zeros(16, np.float32)[::2]}, "base must be a contiguous"),
        ({"local": np.zeros(7, np.float32)}, "local has 7 values where 8 belong"),
        ({"local": np.zeros(8, np.int32)}, "local must be"),
        ({"residual": np.zeros(8, np.float32)}, "int8 takes no residual"),
        ({"out": bytearray(10)}, "10 bytes long, and must take 42"),
        ({"out": bytes(100)}, "read-only"),
        ({"offset": -1}, "offset -1"),
        ({"offset": 2**60}, "outside of"),
        ({"base": np.zeros(CHUNK_VALUES + 1, np.float32)}, "at most 1,048,576 values"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(CodecError, match=says):
        codec_of("int8").encode(**({"base": np.zeros(8, np.float32)} | arguments))  # type: ignore[arg-type]


def test_topk_asks_for_a_residual_it_can_write() -> None:
    codec, values = codec_of("topk"), np.zeros(8, np.float32)
    frozen = np.zeros(8, np.float32)
    frozen.flags.writeable = False
    for residual, says in (
        (None, "needs the cluster's residual"),
        (np.zeros(7, np.float32), "residual has 7"),
        (frozen, "read-only"),
    ):
        with pytest.raises(CodecError, match=says):
            codec.encode(values, residual=residual)


def test_a_destination_that_does_not_fit_is_refused() -> None:
    chunk = codec_of("int8").encode(np.ones(8, np.float32))
    frozen = np.zeros(8, np.float32)
    frozen.flags.writeable = False
    for out in (np.zeros(7, np.float32), np.zeros(9, np.float32), np.zeros(8), np.zeros(16, np.float32)[::2], frozen):
        with pytest.raises(CodecError, match="out "):
            decode(chunk, out)
        with pytest.raises(CodecError, match="accumulator "):
            decode_accumulate(chunk, 1.0, out)
    for weight in (np.nan, np.inf, 1e39):
        with pytest.raises(CodecError, match="weight"):
            decode_accumulate(chunk, weight, np.zeros(8, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_inputs_may_be_read_only_and_are_not_changed(name: str) -> None:
    codec, base, local = codec_of(name), gaussian(300), gaussian(300, 1)
    copies = base.copy(), local.copy()
    base.flags.writeable = local.flags.writeable = False
    chunk = bytes(codec.encode(base, local, residual=residual_for(codec, 300)))
    decode_accumulate(chunk, 1.0, np.zeros(300, np.float32))
    np.testing.assert_array_equal((base, local), copies)


def test_threads_share_a_codec() -> None:
    codec, vectors = codec_of("int4"), [gaussian(50_000, i) for i in range(8)]
    alone = [bytes(codec.encode(v)) for v in vectors]
    with ThreadPoolExecutor(4) as pool:
        assert [bytes(c) for c in pool.map(codec.encode, vectors)] == alone


def test_the_defaults_and_options_of_the_spec_arrive() -> None:
    assert codec_of("int8").block_size == 128
    assert codec_of("int4").block_size == 64
    assert codec_of("int4", block_size=256, rounding="stochastic").stochastic
    topk = codec_of("topk", k=5, residual_decay=0.5)
    assert (topk.k, topk.residual_decay, topk.gathers, topk.needs_residual) == (5, 0.5, True, True)
    assert not codec_of("int8").gathers and not codec_of("int8").needs_residual
    residual = np.full(4, 2, np.float32)
    topk.encode(np.zeros(4, np.float32), residual=residual)
    assert sorted(residual) == [0, 1, 1, 1]  # 0.5 * 2, and the first was sent


def fresh_process(code: str, **environment: str) -> str:
    source = Path(isles.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(source)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_room_compiles_nothing_and_brings_no_torch() -> None:
    code = """
import sys, isles.codec
from isles.codec import kernels, sparse
compiled = [n for m in (kernels, sparse) for n, f in vars(m).items() if getattr(f, "signatures", None)]
print(compiled, "torch" in sys.modules)
"""
    assert fresh_process(code).strip() == "[] False"


def test_a_machine_without_a_folder_for_compiled_code_works(tmp_path: Path) -> None:
    """No writable cache anywhere: files stand where numba would make its folders (this works for root as well)."""
    package = tmp_path / "isles"
    shutil.copytree(Path(isles.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "codec" / "__pycache__").write_text("in the way")
    code = """
import numpy as np
from isles.codec import decode, get_codec
from isles.spec import CodecTable
print(decode(get_codec(CodecTable(name="bf16")).encode(np.ones(3, np.float32))).sum())
"""
    blocked = str(package / "codec" / "__pycache__")
    out = fresh_process(
        code,
        PYTHONPATH=str(tmp_path),
        NUMBA_CACHE_DIR=blocked,
        HOME=blocked,
        XDG_CACHE_HOME=blocked,
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert out.strip() == "3.0"


def compiled_kernels() -> Iterator[tuple[str, object]]:
    for module in (kernels, sparse):
        for name, function in vars(module).items():
            if hasattr(function, "inspect_asm") and function.__module__ == module.__name__:
                yield name, function


def test_one_specialisation_of_each_kernel_is_enough() -> None:
    """bytes, bytearrays, read-only and writable arrays all run the same compiled code: nothing that Python calls is compiled twice."""
    for name in NAMES:
        codec = codec_of(name)
        frozen = gaussian(300)
        frozen.flags.writeable = False
        for base, local in pairwise([gaussian(300), frozen, None, frozen]):
            if base is None:
                continue
            chunk = codec.encode(base, local, residual=residual_for(codec, 300))
            for kind in (bytes, bytearray, memoryview, lambda c: np.frombuffer(bytearray(c), np.uint8)):
                decode_accumulate(kind(chunk), 1.0, np.zeros(300, np.float32))
                decode(kind(chunk))
    used = {
        name: len(f.signatures) for name, f in compiled_kernels() if re.match("(en|de)code_|add_|finite_|.*_fit|check", name)
    }  # type: ignore[attr-defined]
    assert {name for name, count in used.items() if count > 1} == set()
    assert len(used) > 15 and used["add_int8"] == 1


def test_no_multiply_and_add_is_fused(tmp_path: Path) -> None:
    """Compiled anew (cached code cannot be inspected), the accumulating loops hold no fused instruction of x86 or ARM."""
    code = """
import numpy as np
from isles.codec import decode_accumulate, get_codec, kernels, sparse
from isles.spec import CodecTable
for name in ("fp32", "bf16", "int8", "int4", "topk"):
    codec = get_codec(CodecTable(name=name))
    values = np.ones(300, np.float32)
    decode_accumulate(codec.encode(values, values, residual=values.copy() if codec.needs_residual else None), 0.3, values)
for module in (kernels, sparse):
    for function in vars(module).values():
        if hasattr(function, "inspect_asm"):
            print(*function.inspect_asm().values())
"""
    assembly = fresh_process(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert len(assembly) > 100_000
    assert re.search(r"\b(vfn?m(add|sub)|fn?m(add|sub)\b|fml[as]\b)", assembly) is None
