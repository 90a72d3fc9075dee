"""What a cluster keeps of the past: for those who missed a few rounds, and for as long as a joiner is at it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.unit.test_agent_state import an_average, state_of

from isles.agent.journal import Journal
from isles.agent.saving import ROUNDS, Saving
from isles.exchange.spool import Averages
from isles.worker.checkpoint import CheckpointStore


class Keeper:
    """A cluster that applies rounds and saves after each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.wanted = folder, state_of(), list[int]()
        self.averages = Averages(folder / "averages")
        self.checkpoints = CheckpointStore(folder / "checkpoints", run_digest="r")
        self.journal = Journal(folder / "journal.json", 1)
        exchange: Any = self
        self.saving = Saving(self.state, self.checkpoints, self.journal, exchange, every=0, step=0, wanted=lambda: self.wanted)

    def forget(self, fragment: int, before: int) -> None:
        self.averages.forget(fragment, before)

    def rounds(self, first: int, last: int, *, save: bool = True) -> None:
        for number in range(first, last + 1):
            _, digest = an_average(self.folder / "averages", number)
            self.averages._find(self.folder / "averages" / f"r{number}.json")
            self.state.apply(0, number, self.averages.checked(0, number, digest), shift=False)
            self.journal.applied(0, number, digest, landed=True)
            if save:
                asyncio.run(self.saving.save(10 * number))

    @property
    def kept(self) -> list[int]:
        return [number for number, _ in self.averages.held(0)]


def test_averages_stay_since_the_checkpoint_before_the_newest(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    keeper.rounds(1, 5)
    assert keeper.checkpoints.steps() == [40, 50] and keeper.kept == [4, 5]
    assert [a.number for a in keeper.journal.fragments[0].applied] == [5]
    assert not keeper.saving.due(0, 3 + ROUNDS, 10**9) and keeper.saving.due(0, 5 + ROUNDS, 0)


def test_a_checkpoint_that_is_being_fetched_stays_with_all_averages_since_until_these_are_too_large(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    keeper.rounds(1, 5)
    keeper.wanted = [40]
    keeper.rounds(6, 6)
    assert keeper.checkpoints.steps() == [40, 50, 60] and keeper.kept == [4, 5, 6]
    assert [a.number for a in keeper.journal.fragments[0].applied] == [5, 6]  # which are offered to others
    keeper.rounds(7, 7)
    assert keeper.checkpoints.steps() == [40, 60, 70] and keeper.kept == [4, 5, 6, 7]
    keeper.rounds(8, 8)  # four fp32 averages are larger than parameters and momentum twice
    assert keeper.checkpoints.steps() == [70, 80] and keeper.kept == [7, 8]
    keeper.wanted = [30]  # of which nothing is here any more
    keeper.rounds(9, 9)
    assert keeper.checkpoints.steps() == [80, 90] and keeper.kept == [8, 9]
