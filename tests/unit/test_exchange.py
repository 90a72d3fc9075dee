"""From contributions to the average that every cluster applies."""

from __future__ import annotations

import numpy as np
import pytest

import isles.exchange.averaging as averaging
from isles.codec import NonFiniteError, get_codec
from isles.exchange import average, bytes_on_wire, encode_contribution
from isles.outer import tensor_norms
from isles.spec import CodecTable, OuterTable

N = 10_000
TENSORS = [(0, 3000), (3000, N)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a small fragment."""
    monkeypatch.setattr(averaging, "CHUNK_VALUES", 4096)


def _deltas(m: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((m, N)).astype(np.float32) * 0.01)


def _average(
    codec_name: str,
    deltas: list[np.ndarray],
    tokens: list[int],
    table: OuterTable | None = None,
    names: list[str] | None = None,
):
    codec = get_codec(CodecTable(name=codec_name))
    zeros = np.zeros(N, np.float32)
    contributions = [
        encode_contribution(
            codec, d, zeros, start=0, cluster=(names or [f"c{i}" for i in range(len(deltas))])[i], tokens=t, seed=i,
            residual=np.zeros(N, np.float32) if codec.needs_residual else None,
        )
        for i, (d, t) in enumerate(zip(deltas, tokens, strict=True))
    ]  # fmt: skip
    return codec, contributions, average(codec, contributions, table or OuterTable(), TENSORS, start=0, size=N, seed=9)


def test_the_mean_follows_the_tokens() -> None:
    deltas = _deltas(3)
    _, _, mean = _average("fp32", deltas, [100, 100, 200])
    assert np.allclose(mean.values, 0.25 * deltas[0] + 0.25 * deltas[1] + 0.5 * deltas[2], atol=1e-8)


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    deltas, names = _deltas(4), ["d", "b", "a", "c"]
    _, _, one = _average("int4", deltas, [1, 2, 3, 4], names=names)
    codec, contributions, _ = _average("int4", deltas, [1, 2, 3, 4], names=names)
    two = average(codec, contributions[::-1], OuterTable(), TENSORS, start=0, size=N, seed=9)
    assert np.array_equal(one.values, two.values)


@pytest.mark.parametrize(("codec", "error"), [("bf16", 0.01), ("int8", 0.02), ("int4", 0.25)])
def test_what_is_applied_is_the_decoded_average(codec: str, error: float) -> None:
    deltas = _deltas(4)
    _, _, mean = _average(codec, deltas, [1] * 4)
    true = np.mean(deltas, axis=0)
    assert 0 < np.linalg.norm(mean.values - true) / np.linalg.norm(true) < error
    again = get_codec(CodecTable(name=codec))
    assert np.allclose(
        averaging.decode_chunks([again.encode(mean.values[:4096])], 4096), mean.values[:4096], rtol=0.02, atol=1e-4
    )


def test_radial_keeps_the_weighted_mean_of_the_norms_per_tensor() -> None:
    deltas = _deltas(4)
    _, _, merged = _average("fp32", deltas, [1, 1, 1, 3], OuterTable(merge="radial"))
    wanted = np.average([tensor_norms(d, TENSORS) for d in deltas], axis=0, weights=[1, 1, 1, 3])
    assert np.allclose(tensor_norms(merged.values, TENSORS), wanted, rtol=1e-5)


@pytest.mark.parametrize("m", [2, 3, 8])
def test_bytes_are_two_times_m_minus_one_of_the_encoded_size(m: int) -> None:
    codec, contributions, mean = _average("int8", _deltas(m), [1] * m)
    size = contributions[0].nbytes
    assert bytes_on_wire(codec, contributions, mean, m) == 2 * (m - 1) * size
    assert bytes_on_wire(codec, contributions, mean, m + 1) == (m - 1) * size + m * size  # a late cluster takes the result too


def test_gathered_contributions_travel_to_everyone() -> None:
    codec, contributions, mean = _average("topk", _deltas(4), [1] * 4)
    assert mean.nbytes == 0 and bytes_on_wire(codec, contributions, mean, 4) == 3 * sum(c.nbytes for c in contributions)


def test_a_value_that_is_not_finite_leaves_error_feedback_as_it_was() -> None:
    codec = get_codec(CodecTable(name="topk"))
    base, local = _deltas(2)
    residual = _deltas(1, seed=5)[0]
    before = residual.copy()
    base[9000] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        encode_contribution(codec, base, local, start=500, cluster="a", tokens=1, seed=0, residual=residual)
    assert caught.value.index == 9500 and np.array_equal(residual, before)


def test_error_feedback_holds_back_what_was_not_sent() -> None:
    codec = get_codec(CodecTable(name="topk"))
    base, local = _deltas(2)
    residual = np.zeros(N, np.float32)
    sent = encode_contribution(codec, base, local, start=0, cluster="a", tokens=1, seed=0, residual=residual)
    assert np.allclose(averaging.decode_chunks(sent.chunks, N) + residual, base - local, atol=1e-7)


def test_an_average_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights"):
        average(get_codec(CodecTable(name="fp32")), [], OuterTable(), TENSORS, start=0, size=N, seed=0)
