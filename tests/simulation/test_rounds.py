"""The protocol's two promises over 2,000 seeded histories, and proof that the simulation would notice if they were broken."""

from __future__ import annotations

import pytest
from tests.simulation.mutations import MUTATIONS, planted
from tests.simulation.run import Violation, play

SEEDS, BATCH = 2000, 100

FOUND_BY = {
    "apply before commit": 0,
    "commit by the first holder, of any attempt": 144,
    "names instead of processes": 16,
    "nobody is ever lost": 1,
    "exposed contributions are kept": 20,
    "late progress is thrown away": 7,
    "no compare-and-set": 6,
    "a joiner takes part before it holds the state": 0,
    "most must hold an average, however long": 281,
    "who cannot be reached goes on alone": 44,
    "other parameters are never renewed": 11,
    "one that hangs alone is waited for": 13,
    "whom most contradict stays": 66,
    "a store's loss is not mended": 1070,
    "revisions outlive the store's loss": 34,
    "what a process before had shown is forgotten": 33,
}


@pytest.mark.parametrize("start", range(0, SEEDS, BATCH))
def test_clusters_agree_and_the_run_goes_on(start: int) -> None:
    for seed in range(start, start + BATCH):
        play(seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name), pytest.raises(Violation):
        play(FOUND_BY[name])


def test_a_seed_plays_the_same_way_twice() -> None:
    assert play(17) == play(17)
