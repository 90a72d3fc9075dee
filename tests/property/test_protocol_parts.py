"""Parts cover the fragment once, belong to owners, and are as good as any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.protocol import Part
from isles.protocol.parts import CHUNK_UNIT, CHUNK_VALUES, chunk_values, plan_parts, replan_parts

speeds = st.lists(st.one_of(st.just(0.0), st.floats(1e5, 1e9)), min_size=1, max_size=12)


def chunks_of(parts: tuple[Part, ...]) -> list[int]:
    return [chunk for part in parts for chunk in range(part.first, part.stop)]


def named(values: list[float]) -> dict[str, float]:
    return {f"c{i:02d}": value for i, value in enumerate(values)}


@given(speeds, st.integers(1, 3000), st.integers(0, 5))
def test_every_chunk_has_one_owner(values: list[float], chunks: int, others: int) -> None:
    parts = plan_parts(chunks, named(values), len(values) + others)
    assert chunks_of(parts) == list(range(chunks))
    assert {p.owner for p in parts} <= set(named(values))


@given(speeds, st.integers(1, 400), st.data())
def test_survivors_keep_what_they_have(values: list[float], chunks: int, data: st.DataObject) -> None:
    owners = named(values)
    before = plan_parts(chunks, owners, len(owners))
    staying = data.draw(st.sets(st.sampled_from(sorted(owners)), min_size=1))
    after = replan_parts(before, {name: owners[name] for name in staying}, len(staying))
    assert chunks_of(after) == list(range(chunks))
    assert {p.owner for p in after} <= staying
    assert {p for p in before if p.owner in staying} <= set(after)


@given(st.lists(st.floats(1e6, 1e9), min_size=3, max_size=8))
def test_the_slowest_line_finishes_with_the_others(values: list[float]) -> None:
    """No shifting of a chunk from the cluster that is last to another makes the round shorter."""
    m, chunks = len(values), 1000
    owners = named(values)
    counts = dict.fromkeys(owners, 0)
    for part in plan_parts(chunks, owners, m):
        counts[part.owner] += part.stop - part.first

    def seconds(name: str, count: int) -> float:
        return (1 + count / chunks * (m - 2)) / owners[name]

    last = max(owners, key=lambda n: seconds(n, counts[n]))
    best = seconds(last, counts[last])
    if counts[last]:
        gain = seconds(last, counts[last] - 2)
        assert all(seconds(n, counts[n] + 2) >= min(best, gain) for n in owners if n != last)


@pytest.mark.parametrize(
    ("values", "shares"),
    [
        ([1.0, 1.0, 1.0, 1.0], [250, 250, 250, 250]),
        ([1.0, 1.0], [500, 500]),
        ([100.0, 100.0, 100.0, 20.0], [334, 333, 333, 0]),  # a fifth of the speed: done when its own has gone through
        ([4.0, 1.0, 1.0], [1000, 0, 0]),
        ([0.0, 0.0], [500, 500]),
    ],
)
def test_shares_worked_out_by_hand(values: list[float], shares: list[int]) -> None:
    counts = dict.fromkeys(named(values), 0)
    for part in plan_parts(1000, named(values), len(values)):
        counts[part.owner] += part.stop - part.first
    assert list(counts.values()) == shares


def test_nobody_to_own_is_an_error() -> None:
    with pytest.raises(ValueError, match="nobody"):
        plan_parts(3, {}, 2)


@given(st.integers(1, 10**9), st.integers(1, 300))
def test_chunks_are_whole_blocks_and_never_too_large(size: int, clusters: int) -> None:
    values = chunk_values(size, clusters)
    assert values % CHUNK_UNIT == 0 and CHUNK_UNIT <= values <= CHUNK_VALUES


def test_the_chunk_is_that_of_the_codec() -> None:
    from isles.codec import CHUNK_VALUES as CODEC

    assert CHUNK_VALUES == CODEC
