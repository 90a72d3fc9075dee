"""The order of the data is a permutation for every n, mixed well, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.data import Permutation, sample_ids
from isles.data.order import mix

GOLDEN_MIX = [16294208416658607535, 13608149317741381227, 8469423419722949687]
GOLDEN_TEN = [5, 1, 8, 4, 7, 3, 0, 2, 9, 6]
GOLDEN_MILLION = [384188, 503031, 97621, 781416]
GOLDEN_HUGE = [429866677022739113, 174138929368337212]
GOLDEN_STREAM = [2, 1, 4, 0, 3, 0, 4, 3, 2, 1, 2, 3]

seeds = st.integers(0, 2**63 - 1)


@given(n=st.integers(1, 5000), seed=seeds)
def test_every_size_is_permuted_without_loss_or_repeat(n: int, seed: int) -> None:
    values = Permutation(n, seed)(np.arange(n))
    assert np.array_equal(np.sort(values), np.arange(n))


@given(n=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_huge_sizes_stay_in_range_and_distinct(n: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True)), dtype=np.int64)
    values = Permutation(n, seed)(positions)
    assert values.dtype == np.int64 and values.min() >= 0 and values.max() < n
    assert np.unique(values).size == positions.size


@given(n=st.integers(1, 300), seed=seeds, first_pass=st.integers(0, 10**6), start=st.integers(0, 299))
def test_every_pass_holds_every_sample_once(n: int, seed: int, first_pass: int, start: int) -> None:
    positions = np.arange(first_pass * n, (first_pass + 2) * n)
    ids = sample_ids(positions, n, seed)
    for part in (ids[:n], ids[n:]):
        assert np.array_equal(np.sort(part), np.arange(n))
    cut = start % n + 1  # what a position holds does not depend on what is asked for with it
    assert np.array_equal(np.concatenate([sample_ids(positions[:cut], n, seed), sample_ids(positions[cut:], n, seed)]), ids)


@given(shape=st.sampled_from([(0,), (3, 4), (2, 0, 5), ()]))
def test_the_shape_of_positions_is_kept(shape: tuple[int, ...]) -> None:
    positions = np.zeros(shape, dtype=np.int64)
    assert Permutation(7, 1)(positions).shape == shape
    assert sample_ids(positions, 7, 1).shape == shape


def test_the_order_is_the_same_on_every_machine() -> None:
    """Golden values: a change of any of them changes the data order of every run that is resumed."""
    assert [mix(0), mix(1, 2), mix(2**63 - 5, 7)] == GOLDEN_MIX
    assert Permutation(10, 0)(np.arange(10)).tolist() == GOLDEN_TEN
    assert Permutation(1_000_003, 42)(np.array([0, 1, 2, 1_000_002])).tolist() == GOLDEN_MILLION
    assert Permutation(2**62, 7)(np.array([0, 2**62 - 1])).tolist() == GOLDEN_HUGE
    assert sample_ids(np.arange(12), 5, 3).tolist() == GOLDEN_STREAM


def test_the_order_is_well_mixed() -> None:
    """Statistics that are far outside chance for a weak mix (a shift, a stride, too few rounds). 5 sigma each; fixed seeds."""
    for seed in range(20):
        n = 20_000
        values = Permutation(n, seed)(np.arange(n)).astype(np.float64)
        sigma = 1 / np.sqrt(n)
        for lag in (1, 2, 141, 142):  # 142 = ceil(sqrt(n)): the network's own row length
            correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
            assert abs(correlation) < 5 * sigma, f"seed {seed}, lag {lag}: correlation {correlation}"
        assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 5 * sigma, f"seed {seed}: follows its position"
        # positions in 100 blocks by values in 100 blocks: 2 expected in each cell
        cells = np.histogram2d(np.arange(n) // 200, values // 200, bins=100)[0]
        chi = ((cells - 2) ** 2 / 2).sum()
        freedom = 99 * 99
        assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom), f"seed {seed}: chi-square {chi} for {freedom}"
        fixed = int((values == np.arange(n)).sum())
        assert fixed <= 9, f"seed {seed}: {fixed} fixed points, 1 expected"


def test_seeds_and_passes_give_unrelated_orders() -> None:
    n = 10_000
    a, b = Permutation(n, 1)(np.arange(n)), Permutation(n, 2)(np.arange(n))
    stream = sample_ids(np.arange(2 * n), n, 1)
    for first, second in ((a, b), (stream[:n], stream[n:]), (a, stream[:n])):
        assert (first == second).sum() < 12
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_all_orders_of_four_elements_come_equally_often() -> None:
    orders = [tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(4800)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert counts.size == 24
    assert ((counts - 200) ** 2 / 200).sum() < 60  # 23 degrees of freedom: 1 in 30,000


@pytest.mark.parametrize("positions", [[-1], [7], [0, 8]])
def test_positions_outside_are_refused(positions: list[int]) -> None:
    with pytest.raises(IndexError):
        Permutation(7, 0)(np.array(positions))
    with pytest.raises(IndexError):
        sample_ids(np.array([-1]), 7, 0)


@pytest.mark.parametrize("n", [0, -3, 2**62 + 1])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        Permutation(n, 0)
