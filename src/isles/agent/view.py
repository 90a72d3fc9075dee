"""A run as its store shows it, for people: clusters with their figures, and how far the run has come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import Any

from isles.agent.access import Access
from isles.agent.organiser import KEY, RunRecord
from isles.errors import IslesError, NetworkError
from isles.protocol import BEAT, Board, FiguresRecord, parse
from isles.store import Entry, Store

TRIES = 5  # each of some seconds


class RunState:
    """What is known of a run. Only ever grows; records that cannot be read are left out."""

    def __init__(self) -> None:
        self.run, self.record = "", None  # type: str, RunRecord | None
        self.board = Board()
        self.figures: dict[str, FiguresRecord] = {}

    def take(self, entry: Entry) -> None:
        with contextlib.suppress(IslesError):
            if entry.key == KEY:
                self.record = RunRecord.parse(entry.value, "the store's record of the run")
            elif entry.key.startswith("figures."):
                self.figures[entry.key.partition(".")[2]] = parse(FiguresRecord, entry.value)
            else:
                self.board.put(entry.key, entry.value, entry.revision, time.monotonic())

    @property
    def step(self) -> int:
        return max((seen.record.step for seen in self.board.rounds.values()), default=0)

    def rows(self, now: float) -> list[dict[str, Any]]:
        """One a cluster, by name, as the table of clusters takes them. now: of `time.monotonic`."""
        rows = []
        for name, seen in sorted(self.board.members.items()):
            member, figures = seen.record, self.figures.get(name)
            row: dict[str, Any] = {
                "cluster": name, "state": str(member.state), "step": member.step, "rounds": list(member.rounds), "age": now - seen.since,
                "address": member.address, "patience": 2.0 * BEAT,
            }  # fmt: skip
            if member.state == "leaving" and self.record is not None and member.step >= self.record.spec.run.steps:
                row["state"] = "finished"
            if figures is not None:
                row |= {k: v for k, v in asdict(figures).items() if v is not None} | {"trained_seconds": figures.seconds}
            rows.append(row)
        return rows

    def summary(self) -> dict[str, Any]:
        """run, name, step, steps, rounds."""
        spec = self.record.spec if self.record is not None else None
        return {
            "run": self.run, "name": spec.run.name if spec else "", "step": self.step, "steps": spec.run.steps if spec else 0,
            "rounds": [self.board.rounds[f].record.open - 1 for f in sorted(self.board.rounds)],
            "phases": [str(self.board.rounds[f].record.phase) for f in sorted(self.board.rounds)],
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return self.summary() | {"clusters": self.rows(time.monotonic())}


async def read_run(access: Access) -> RunState:
    """The run as it stands now. Raises NetworkError."""
    state = RunState()
    state.run = access.run
    async with access.store() as store:
        for pause in (0.0, 2.2 * BEAT):  # twice: who has not refreshed in between may be gone
            await asyncio.sleep(pause)
            for entry in await _everything(store):
                state.take(entry)
    if state.record is None:
        raise NetworkError("the store does not show a run yet; the organiser starts it with `isles store`")
    return state


async def _everything(store: Store) -> list[Entry]:
    """Every record; a store of several members that has just lost one needs some seconds to find itself again. Raises NetworkError."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(NetworkError):
            return await store.everything()
    return await store.everything()


async def follow_run(access: Access, state: RunState) -> None:
    """Keep `state` up to date, for ever. Raises NetworkError when the store cannot be used to begin with."""
    state.run = access.run
    async with access.store() as store:
        store.on_state = lambda up: (
            state.board.connected(time.monotonic()) if up else state.board.disconnected(time.monotonic())
        )
        async for entry in store.watch():
            state.take(entry)
