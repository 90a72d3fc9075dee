"""The shared record of claimed samples, and an agent that was killed, or whose store forgot, at any moment of a claim."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.agent import samples as module
from isles.agent.claims import Claims
from isles.agent.journal import Journal
from isles.agent.samples import Samples
from isles.errors import DataError, DiskError, NetworkError
from isles.protocol import Board
from isles.worker.link import Claim, Need


@dataclass(frozen=True)
class Entry:
    value: bytes
    revision: int


class Memory:
    """A store of one key."""

    def __init__(self) -> None:
        self.entry: Entry | None = None

    async def get(self, key: str) -> Entry | None:  # noqa: ARG002
        return self.entry

    async def create(self, key: str, value: bytes) -> int | None:  # noqa: ARG002
        return self._set(value) if self.entry is None else None

    async def update(self, key: str, value: bytes, revision: int) -> int | None:  # noqa: ARG002
        return self._set(value) if self.entry is not None and self.entry.revision == revision else None

    def _set(self, value: bytes) -> int:
        self.entry = Entry(value, self.entry.revision + 1 if self.entry else 1)
        return self.entry.revision


def samples_of(store: Memory, journal: Journal, given_out: list[Claim]) -> Samples:
    made: Any = store
    return Samples("a", 1000, store=lambda: made, board=Board(), journal=journal, give=given_out.append)


async def answered(samples: Samples, given_out: list[Claim], *needs: Need) -> None:
    serving = asyncio.create_task(samples.serve())
    for need in needs:
        count = len(given_out)
        samples.need(need)
        async with asyncio.timeout(5):
            while len(given_out) == count:
                await asyncio.sleep(0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def test_a_claim_that_did_not_come_to_the_workers_is_given_again(tmp_path: Path) -> None:
    async def play() -> None:
        store, out = Memory(), list[Claim]()
        journal = Journal(tmp_path / "journal.json", 1)
        await answered(samples_of(store, journal, out), out, Need(1, 8), Need(2, 8))
        again = samples_of(store, Journal(tmp_path / "journal.json", 1), out)  # the agent was killed
        await answered(again, out, Need(2, 8), Need(3, 8))
        assert [c.number for c in out] == [1, 2, 2, 3]
        assert out[1] == out[2]
        ranges = list(itertools.chain(*(c.ranges for c in (out[0], *out[2:]))))
        assert ranges == [(0, 8), (8, 16), (16, 24)]

    asyncio.run(play())


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        store, out, journal = Memory(), list[Claim](), Journal(tmp_path / "journal.json", 1)
        tries, claimed = [], journal.claimed

        def full(number: int) -> None:
            tries.append(number)
            if len(tries) == 1:
                raise DiskError("no space")
            claimed(number)

        monkeypatch.setattr(journal, "claimed", full)
        await answered(samples_of(store, journal, out), out, Need(1, 8))
        assert tries == [1, 1] and [c.ranges for c in out] == [((0, 8),)]

    asyncio.run(play())


@settings(max_examples=60)
@given(lost=st.integers(0, 5), number=st.integers(1, 9))
def test_a_record_that_lost_its_last_writes_gives_the_claim_that_is_asked_for(lost: int, number: int) -> None:
    claims = Claims.empty(1000)
    for i in range(1, lost + 1):
        claims.give("a", i, {"a": 8, "b": 8})
    changed = claims.give("a", number, {"a": 8, "b": 8})
    assert changed == (number > lost)
    assert sum(stop - start for start, stop in claims.ranges("a", number)) == 8
    assert not claims.give("a", number, {"a": 8, "b": 8})


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"given": {}, "counted": 0, "ledger": {"size": Infinity}}', b"[]", b'{"given": [], "counted": 0}'],
)
def test_a_record_that_is_none_is_said_in_a_sentence(data: bytes) -> None:
    """Any host of the run may write it."""
    with pytest.raises(DataError, match="damaged"):
        Claims.parse(data)


DAMAGED = [b"", b"[" * 100_000, b'{"given": [], "counted": 0}', Claims.empty(999).pack()]


@pytest.mark.parametrize("data", DAMAGED)
def test_who_has_seen_the_record_whole_puts_it_back(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        store, out = Memory(), list[Claim]()
        samples = samples_of(store, Journal(tmp_path / "journal.json", 1), out)
        await answered(samples, out, Need(1, 8), Need(2, 8))
        store._set(data)
        await answered(samples, out, Need(3, 8))
        store._set(data)
        await answered(samples, out, Need(3, 8))  # nothing is new, and the record is whole again all the same
        assert store.entry is not None and Claims.parse(store.entry.value).given == {"a": 3}
        assert [c.ranges for c in out] == [((0, 8),), ((8, 16),), ((16, 24),), ((16, 24),)]
        assert "putting back" in caplog.text

    asyncio.run(play())


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_record_that_nobody_puts_back_begins_anew(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        store, out = Memory(), list[Claim]()
        store._set(data)
        samples = samples_of(store, Journal(tmp_path / "journal.json", 1), out)
        with pytest.raises(NetworkError, match="waiting for a cluster that has seen it whole"):
            await samples._claim(Need(1, 8))
        assert store.entry is not None and store.entry.value == data
        monkeypatch.setattr(module, "FREE_AFTER", 0.0)
        await answered(samples, out, Need(1, 8))
        assert [c.ranges for c in out] == [((0, 8),)]

    asyncio.run(play())
