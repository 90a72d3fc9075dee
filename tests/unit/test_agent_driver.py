"""One fragment's driver against a bad disk: no step in part, no round that nobody tells the workers of, no attempt that is never begun again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.test_agent_state import CHUNK, SIZE, an_average, state_of

from isles.agent import driver as module
from isles.agent.driver import FragmentDriver
from isles.agent.journal import Journal
from isles.codec import get_codec
from isles.errors import CheckpointError, DiskError, NetworkError
from isles.exchange.spool import Averages
from isles.protocol import Board, Participant, Phase, ReadyRecord, RoundRecord, Rules
from isles.protocol.parts import plan_parts
from isles.spec import CodecTable, OuterTable
from isles.worker.link import Flight


class Disk:
    """An exchange that keeps averages, and whose attempts end as they are told to."""

    def __init__(self, averages: Averages) -> None:
        self.averages = averages
        self.outcomes: list[str | Exception] = []

    def result(self, fragment: int, number: int, digest: str) -> Any:
        return self.averages.checked(fragment, number, digest)

    def blamed(self, _: int) -> tuple[str, ...]:
        return ()

    async def exchange(self, *_: object) -> str:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Told:
    """Workers that remember what they were told."""

    def __init__(self) -> None:
        self.merged: list[int] = []

    async def release(self, _: int) -> bool:
        return True

    async def merge(self, _: int, number: int, **__: object) -> None:
        self.merged.append(number)


def driver_of(folder: Path, averages: Averages) -> FragmentDriver:
    async def nothing(*_: object) -> None:
        pass

    def failed(error: Exception) -> None:
        raise error

    store: Any = SimpleNamespace(connected=False)
    exchange: Any = Disk(averages)
    made = FragmentDriver(
        0, cluster="a", incarnation="1" * 8, run="run", seed=1, state=state_of(), codec=get_codec(CodecTable(name="fp32")),
        table=OuterTable(), rules=Rules((SIZE,)), board=Board(), store=store, exchange=exchange, workers=Told(),
        journal=Journal(folder / "journal.json", 1), lock=asyncio.Lock(), wake=lambda: None, committed=nothing, catch_up=nothing,
        failed=failed, spoiled=nothing,
    )  # fmt: skip
    made.own = True
    made.prepared = ReadyRecord(1, made.incarnation, made.state.fragments[0].digest, tokens=10, step=1)
    return made


def run(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(play(), 15))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(module.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def test_an_average_with_a_bad_chunk_moves_nothing_and_is_fetched(tmp_path: Path) -> None:
    async def play() -> None:
        averages, digest = an_average(tmp_path, 1)
        with (tmp_path / "r1.spool").open("r+b") as file:
            file.seek(averages.get(0, 1, digest).spool.slot * 2 + 100)  # type: ignore[union-attr]
            file.write(b"\xff\xff\xff")
        driver = driver_of(tmp_path, averages)
        with pytest.raises(CheckpointError, match="does not match its hash"):
            await driver.apply(1, digest, True)
        assert not driver.state.globals.any() and driver.applied == 0 and driver.workers.merged == []  # type: ignore[attr-defined]
        assert (1, digest) not in driver.local().held and not list(tmp_path.glob("*.spool"))

    run(play)


def test_workers_hear_of_a_round_whose_journal_the_disk_refused_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save, refusals = Journal.save, [1, 2, 3]

    def full(self: Journal) -> None:
        if refusals:
            refusals.pop()
            raise DiskError("the journal cannot be written")
        save(self)

    monkeypatch.setattr(Journal, "save", full)

    async def play() -> None:
        averages, digest = an_average(tmp_path, 1)
        driver = driver_of(tmp_path, averages)
        await driver.apply(1, digest, True)
        assert driver.workers.merged == [1] and driver.prepared is None  # type: ignore[attr-defined]
        assert np.allclose(driver.state.globals, -1.33)  # stepped once
        assert [a.number for a in Journal(tmp_path / "journal.json", 1).fragments[0].applied] == [1]

    run(play)
    assert not refusals and caplog.text.count("the journal cannot be written") == 1


@pytest.mark.parametrize("killed", [True, False])
def test_progress_that_was_being_moved_when_the_agent_was_killed_is_not_moved_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    async def play() -> None:
        averages, digest = an_average(tmp_path, 1)
        driver = driver_of(tmp_path, averages)
        if killed:
            monkeypatch.setattr(driver.journal, "applied", kill)
            with pytest.raises(Killed):
                await driver.apply(1, digest, False)
        else:
            await driver.apply(1, digest, False)
        again = driver_of(tmp_path, averages)
        again.state.fragments[0].applied = 0 if killed else 1
        flight = Flight(1, 10, ())
        if killed:
            with pytest.raises(NetworkError, match="was being moved"):
                again.found(flight, 0, released=False)
        else:
            assert again.found(flight, 1, released=False) is None

    run(play)


def test_an_attempt_that_the_disk_ended_is_begun_again(tmp_path: Path) -> None:
    async def play() -> None:
        driver = driver_of(tmp_path, Averages(tmp_path))
        driver.exchange.outcomes = [DiskError("the disk is full"), "d" * 64]  # type: ignore[attr-defined]
        parts = plan_parts(SIZE // CHUNK, {"a": 0.0}, 1)
        record = RoundRecord(
            0, 1, Phase.EXCHANGE, 0, (Participant("a", "1" * 8, 10),), parts, CHUNK, driver.state.fragments[0].digest
        )
        driver.board.put("rounds.0", module.pack(record), 1, 0.0)
        begun = 0
        while driver.local().attempt is None or driver.local().attempt.digest is None:  # type: ignore[union-attr]
            if driver.attempt is None:
                begun += 1
                driver.act(1.0)
                assert driver.attempt is not None
            await asyncio.sleep(0.005)
        assert begun == 2 and driver.attempt.digest == "d" * 64  # type: ignore[union-attr]
        await driver.close()

    run(play)
