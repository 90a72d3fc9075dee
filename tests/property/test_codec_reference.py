"""The compiled codecs against the torch reference: the same chunks, residuals, values, sums and errors, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from isles.codec import NonFiniteError, decode, decode_accumulate, get_codec, reference
from isles.spec import CodecTable

Floats = NDArray[np.float32]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    127.0,
    1e-45,
    -1e-45,
    1.1754944e-38,
    1e-38,
    1.5e-36,
    2.0**-126 * 7,
    3.4028235e38,
]
BAD = [np.nan, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 3.3961776e38, 3.36e38, 2.97e38]


@st.composite
def tables(draw: st.DrawFn) -> CodecTable:
    name = draw(st.sampled_from(["fp32", "bf16", "int8", "int4", "topk"]))
    return CodecTable(
        name=name,
        block_size=draw(st.sampled_from([None, 32, 64, 128, 256])),
        rounding=draw(st.sampled_from(["nearest", "stochastic"])),
        k=draw(st.sampled_from([1, 2, 3, 64, 1000, 4096])),
        residual_decay=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
    )


@st.composite
def vectors(draw: st.DrawFn, count: int) -> Floats:
    """Random numbers of one magnitude per vector, with stretches of zeros, ties, denormals and other special values among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1.0, 1.0, 1e-3, 1e-30, 1e-36, 1e-38, 1e-42, 1e30, 1e36]))
    values = (rng.standard_normal(count) * scale).astype(np.float32)
    kind = draw(st.sampled_from(["plain", "zeros", "ties", "special", "constant"]))
    if kind == "zeros":
        values[rng.random(count) < 0.9] = 0
    elif kind == "ties":
        values = np.sign(values) * np.float32(scale) * rng.integers(0, 4, count).astype(np.float32)
    elif kind == "special":
        some = rng.random(count) < 0.1
        values[some] = rng.choice(np.array(SPECIAL[:-1], np.float32), some.sum())
    elif kind == "constant":
        values[:] = np.float32(draw(st.sampled_from(SPECIAL[:-1])))
    return values


@st.composite
def cases(draw: st.DrawFn) -> tuple[CodecTable, Floats, Floats | None, Floats | None, int, int]:
    table = draw(tables())
    count = draw(st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 4097, 8191, 9000])))
    base = draw(vectors(count))
    local = draw(st.one_of(st.none(), vectors(count)))
    residual = draw(vectors(count)) if table.name == "topk" else None
    offset = draw(st.one_of(st.integers(0, 1000), st.integers(2**32 - 5000, 2**32 + 10), st.integers(2**40, 2**56 - 2**20)))
    return table, base, local, residual, offset, draw(st.integers(-(2**70), 2**70))


def tensor(values: Floats | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values.copy())


@settings(max_examples=1000)
@given(cases())
def test_chunks_residuals_and_values_have_the_same_bits(
    case: tuple[CodecTable, Floats, Floats | None, Floats | None, int, int],
) -> None:
    table, base, local, residual, offset, seed = case
    theirs = tensor(residual)
    expected = reference.encode(table, torch.from_numpy(base), tensor(local), offset=offset, seed=seed, residual=theirs)
    chunk = get_codec(table).encode(base, local, offset=offset, seed=seed, residual=residual)
    assert bytes(chunk) == expected
    if residual is not None and theirs is not None:
        assert residual.tobytes() == theirs.numpy().tobytes()
    assert decode(chunk).tobytes() == reference.decode(chunk).numpy().tobytes()


@settings(max_examples=600)
@given(cases(), st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e3, max_value=1e3), st.data())
def test_accumulating_is_a_product_and_a_sum_each_rounded_once(
    case: tuple[CodecTable, Floats, Floats | None, Floats | None, int, int], weight: float, data: st.DataObject
) -> None:
    table, base, local, residual, offset, seed = case
    chunk = get_codec(table).encode(base, local, offset=offset, seed=seed, residual=residual)
    before = data.draw(vectors(base.size)) + np.float32(0)  # no -0.0: a value that top-k does not name leaves its sum as it is
    total, theirs = before.copy(), torch.from_numpy(before.copy())
    decode_accumulate(chunk, weight, total)
    with np.errstate(over="ignore"):
        product = np.float32(weight) * decode(chunk)
        assert total.tobytes() == (before + product).tobytes()
    reference.decode_accumulate(chunk, weight, theirs)
    assert total.tobytes() == theirs.numpy().tobytes()


@settings(max_examples=600)
@given(cases(), st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(BAD)), min_size=1, max_size=3))
@example((CodecTable(name="int8"), np.zeros(200, np.float32), None, None, 0, 0), [(150, np.nan), (10, 3.4028235e38)])
def test_what_one_refuses_the_other_refuses_at_the_same_position(
    case: tuple[CodecTable, Floats, Floats | None, Floats | None, int, int], bad: list[tuple[int, float]]
) -> None:
    table, base, local, residual, offset, seed = case
    if base.size == 0:
        return
    for at, value in bad:
        base[at % base.size] = value
    before = None if residual is None else residual.copy()
    try:
        expected = reference.encode(
            table, torch.from_numpy(base), tensor(local), offset=offset, seed=seed, residual=tensor(residual)
        )
    except NonFiniteError as error:
        with pytest.raises(NonFiniteError) as caught:
            get_codec(table).encode(base, local, offset=offset, seed=seed, residual=residual)
        assert caught.value.index == error.index
        assert str(caught.value) == str(error)
        assert residual is None or residual.tobytes() == before.tobytes()  # type: ignore[union-attr]
    else:
        assert bytes(get_codec(table).encode(base, local, offset=offset, seed=seed, residual=residual)) == expected
        assert np.isfinite(decode(expected)).all()


@settings(max_examples=100)
@given(
    count=st.sampled_from([1, 100, 4096, 5000]),
    k=st.sampled_from([1, 3, 64, 4096]),
    beta=st.sampled_from([0.5, 0.95, 1.0]),
    data=st.data(),
)
def test_residuals_stay_the_same_bits_round_after_round(count: int, k: int, beta: float, data: st.DataObject) -> None:
    """And each round, what was sent and what remains make up beta e + d."""
    table = CodecTable(name="topk", k=k, residual_decay=beta)
    residual, theirs = np.zeros(count, np.float32), torch.zeros(count)
    for start in range(3):
        base, local = data.draw(vectors(count)), data.draw(vectors(count))
        e = np.float32(beta) * residual + (base - local)
        chunk = get_codec(table).encode(base, local, offset=start, residual=residual)
        assert bytes(chunk) == reference.encode(table, torch.from_numpy(base), tensor(local), offset=start, residual=theirs)
        assert residual.tobytes() == theirs.numpy().tobytes()
        np.testing.assert_array_equal(residual, e - decode(chunk))


@settings(max_examples=300)
@given(cases(), st.integers(0, 10**6))
@example(
    (CodecTable(name="int4", rounding="stochastic"), np.linspace(-1, 1, 300, dtype=np.float32), None, None, 2**32 - 100, 5), 2
)
def test_a_vector_cut_at_a_border_of_blocks_gives_the_same_values_as_whole(
    case: tuple[CodecTable, Floats, Floats | None, Floats | None, int, int], cut: int
) -> None:
    table, base, local, residual, offset, seed = case
    codec, rest = get_codec(table), None if residual is None else residual.copy()
    block = codec.block_size or 1
    border = cut % (base.size // block + 1) * block
    whole = decode(codec.encode(base, local, offset=offset, seed=seed, residual=residual))
    parts = [
        decode(
            codec.encode(
                base[p],
                None if local is None else local[p],
                offset=offset + p.start,
                seed=seed,
                residual=None if rest is None else rest[p],
            )
        )
        for p in (slice(0, border), slice(border, base.size))
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert rest is None or residual is None or rest.tobytes() == residual.tobytes()
