"""One fragment's rounds, carried out: what the protocol decides becomes exchanges, outer steps and messages to the workers.

The driver holds what `protocol.Local` describes and nothing decides here but `protocol.decide`. Every action runs as a task of its own
that is started at most once at a time; whatever it changes leads to the next decision. The outer step runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from isles.agent.journal import Journal
from isles.agent.state import OuterState, chunk_bounds
from isles.agent.tasks import end
from isles.codec import Codec, NonFiniteError, rounding_seed
from isles.errors import DiskError, IslesError, NetworkError
from isles.exchange import Exchange, Task
from isles.outer import contribution_weights
from isles.protocol import (
    Action,
    Apply,
    Attempt,
    Begin,
    Board,
    CatchUp,
    Cease,
    Create,
    Fetch,
    Local,
    Propose,
    ReadyRecord,
    Renew,
    RoundRecord,
    Rules,
    WriteDone,
    WriteReady,
    after_applying,
    decide,
    pack,
)  # fmt: skip
from isles.spec import OuterTable
from isles.worker.link import Flight

log = logging.getLogger("isles.agent")

AGAIN = 0.2  # seconds after which something that failed is tried again


class Records(Protocol):
    """The store, as the driver needs it."""

    @property
    def connected(self) -> bool: ...

    async def create(self, key: str, value: bytes) -> int | None: ...
    async def update(self, key: str, value: bytes, revision: int) -> int | None: ...
    async def put(self, key: str, value: bytes) -> int: ...


class Workers(Protocol):
    """The cluster's workers, as the driver needs them."""

    async def release(self, fragment: int) -> bool:
        """Have the workers set their unsent progress apart; False when there are none that hold any."""

    async def merge(self, fragment: int, number: int, *, late: bool, landed: bool, step: int) -> None:
        """Tell the workers that round `number` is in the global parameters; step: of the run then, 0 when it is not known."""


class RoundOver(IslesError):
    """A thread was still encoding for a round that is over."""


class FragmentDriver:
    """Drives one fragment. `wake` is called whenever something changed; `committed` after every round that was applied. `lock` is held while
    global parameters change."""

    def __init__(
        self, index: int, *, cluster: str, incarnation: str, run: str, seed: int, state: OuterState, codec: Codec, table: OuterTable,
        rules: Rules, board: Board, store: Records, exchange: Exchange, workers: Workers, journal: Journal, lock: asyncio.Lock,
        wake: Callable[[], None], committed: Callable[[int, int], Awaitable[None]], catch_up: Callable[[int, bool], Awaitable[None]],
        failed: Callable[[Exception], None], spoiled: Callable[[int, int], Awaitable[None]], step: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.index, self.cluster, self.incarnation, self.run, self.seed = index, cluster, incarnation, run, seed
        self.state, self.codec, self.table, self.rules, self.board = state, codec, table, rules, board
        self.store, self.exchange, self.workers, self.journal, self._lock = store, exchange, workers, journal, lock
        self._wake, self._committed, self._catch_up, self._failed = wake, committed, catch_up, failed
        self._spoiled, self._step = spoiled, step
        self.start, self.stop = state.layout.fragments[index]
        self.prepared: ReadyRecord | None = None
        self._sound = True  # whether what is prepared was checked
        self.own = False  # whether the workers that train now are those that handed `prepared` off
        self.attempt: Attempt | None = None
        self._encoding = threading.Lock()
        # round, and values in a chunk, for which the contribution is being encoded
        self._encoded: tuple[int, int] | None = None
        self._exchanging: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._complaints: dict[str, str] = {}  # what each task last failed with; said once
        self._trained_since = time.monotonic()
        self.exchange_seconds = 0.0  # of the last exchange

    @property
    def applied(self) -> int:
        return self.state.fragments[self.index].applied

    def local(self) -> Local:
        attempt = self.attempt
        if attempt is not None and attempt.digest is None:
            attempt = replace(attempt, blamed=self.exchange.blamed(self.index))
        fragment = self.state.fragments[self.index]
        held = frozenset(self.exchange.averages.held(self.index))
        row = self.journal.fragments[self.index]
        exposed = row.exposed, row.incarnation
        prepared = self.prepared if self._sound else None
        return Local(
            self.cluster, self.incarnation, fragment.applied, fragment.digest, prepared, attempt, held, exposed, self._step()
        )  # fmt: skip

    def handed_off(self, flight: Flight) -> None:
        """The workers have written their parameters of this fragment into the shared file. Nobody is told before they are checked."""
        self._sound = False
        fragment = self.state.fragments[self.index]
        self.prepared = ReadyRecord(
            fragment.applied + 1, self.incarnation, fragment.digest, tokens=flight.tokens, step=flight.step,
            seconds=round(time.monotonic() - self._trained_since, 3), ranges=flight.ranges,
        )  # fmt: skip
        self.own = True
        self._once("warm", self._warm())
        self._wake()

    async def _check(self) -> None:
        """See that what was handed off are numbers; what is not never leaves this machine."""
        try:
            await asyncio.to_thread(self.state.check, self.codec, self.index)
        except NonFiniteError as error:
            self.prepared = None
            await self._spoiled(self.index, error.index)
        else:
            self._sound = True

    def workers_gone(self) -> None:
        """The workers began anew: what is prepared is still good, but not theirs."""
        self.own = False

    def found(self, flight: Flight | None, merged: int, *, released: bool) -> tuple[bool, bool] | None:
        """Workers were found that hold this (after the agent's restart, or theirs of the connection).

        Returns the (late, landed) of a merge that they missed, or None. Raises NetworkError when they cannot be brought up to date."""
        last = self.journal.last(self.index)
        if self.journal.fragments[self.index].moving == self.applied + 1:
            raise NetworkError(f"the workers' progress in fragment {self.index} was being moved when the agent was killed")
        missed = self.applied - merged
        if missed > 1 or missed < 0 or (missed == 1 and last is None):
            raise NetworkError(f"the workers stand at round {merged} of fragment {self.index}, the cluster at {self.applied}")
        landed = missed == 1 and last is not None and last.landed
        if flight is not None and not landed and self.prepared is None:
            self.handed_off(flight)
        if missed == 0:
            return None
        if not released and not (landed and flight is not None):
            raise NetworkError(f"the workers' progress in fragment {self.index} was not set apart before round {self.applied}")
        return released, landed

    def act(self, now: float) -> None:
        """Carry out what is to be done now."""
        if "apply" in self._running or "catch-up" in self._running:
            return
        if self.prepared is not None and not self._sound:
            self._once("check", self._check())
        may_propose = self.store.connected
        for action in decide(self.board.view(self.index, now), self.local(), self.rules, may_propose=may_propose):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Create(record):
                self._write(f"rounds.{self.index}", record, 0)
            case Propose(record, revision):
                self._write(f"rounds.{self.index}", record, revision)
            case WriteReady(record):
                self._write(f"ready.{self.index}.{self.cluster}", record, None)
            case WriteDone(record):
                self._write(f"done.{self.index}.{self.cluster}", record, None)
            case Begin(record):
                self._begin(record)
            case Cease():
                self._cease()
            case Apply(number, digest, contributed):
                self._once("apply", self.apply(number, digest, contributed))
            case Fetch(number, digest):
                self._once("fetch", self._fetch(number, digest))
            case CatchUp():
                self._cease()
                self._once("catch-up", self._catch_up(self.index, False))
            case Renew():
                self._cease()
                log.error("fragment %d: our global parameters are not those of the others; taking over theirs", self.index)
                self._once("catch-up", self._catch_up(self.index, True))

    def _once(self, name: str, work: Awaitable[None]) -> None:
        """Run `work` as a task, unless one of that name is under way."""
        if name in self._running:
            if asyncio.iscoroutine(work):
                work.close()
            return

        async def run() -> None:
            try:
                await work
            except IslesError as error:
                self._complain(name, error)
                await asyncio.sleep(AGAIN)  # it will be decided again
            except Exception as error:
                self._failed(error)
            else:
                self._complaints.pop(name, None)
            finally:
                self._running.pop(name, None)
                self._wake()

        self._running[name] = asyncio.create_task(run(), name=f"fragment {self.index}: {name}")

    def _complain(self, name: str, error: IslesError) -> None:
        if self._complaints.get(name) != str(error):
            log.warning("fragment %d: %s: %s", self.index, name, error)
        self._complaints[name] = str(error)

    def _write(self, key: str, record: ReadyRecord | RoundRecord | object, revision: int | None) -> None:
        async def write() -> None:
            data = pack(record)  # type: ignore[arg-type]
            if revision is None:
                await self.store.put(key, data)
            elif revision:
                await self.store.update(key, data, revision)
            else:
                await self.store.create(key, data)

        self._once(key, write())

    # --- the exchange

    async def _warm(self) -> None:
        """Connect to those who may own parts of the round that is about to begin."""
        view = self.board.view(self.index, time.monotonic())
        await self.exchange.warm({name: seen.record.address for name, seen in view.members.items() if view.alive(name)})

    def _begin(self, record: RoundRecord) -> None:
        self._cease()
        self.attempt = Attempt(record.number, record.attempt)
        self._exchanging = asyncio.create_task(self._exchange(record), name=f"fragment {self.index}: exchange")

    def _cease(self) -> None:
        if self._exchanging is not None:
            self._exchanging.cancel()
        self._exchanging = self.attempt = None

    async def _exchange(self, record: RoundRecord) -> None:
        size = self.stop - self.start
        own = rounding_seed(self.seed, self.index, record.number, self.cluster)
        members = self.board.members
        peers = {p.cluster: members[p.cluster].record.address for p in record.participants if p.cluster in members}
        encoded = (record.number, record.chunk)

        def contribution(chunk: int, out: memoryview | None = None) -> memoryview:
            first, stop = chunk_bounds(size, record.chunk, chunk)
            with self._encoding if self.codec.needs_residual else contextlib.nullcontext():
                if self._encoded != encoded:  # a thread that comes too late must not touch the residual
                    raise RoundOver(f"round {record.number} is over")
                return self.state.encode(self.codec, self.index, first, stop, seed=own, out=out)

        log.info("fragment %d: round %d, attempt %d begins", self.index, record.number, record.attempt)
        began = time.monotonic()
        try:
            task = Task(
                run=self.run, record=record, start=self.start, size=size, peers=peers,
                seed=rounding_seed(self.seed, self.index, record.number, "average"),
            )  # fmt: skip
            self._begin_encoding(encoded)
            self.journal.exposed(self.index, record.number, self.incarnation)
            digest = await self.exchange.exchange(task, contribution)
        except IslesError as error:
            self._complain(f"round {record.number}", error)
            await asyncio.sleep(AGAIN)
            self._exchanging = self.attempt = None  # it is begun again, if it still stands
            self._wake()
            return
        except Exception as error:
            self._failed(error)
            return
        if self.attempt is not None and (self.attempt.round, self.attempt.attempt) == (record.number, record.attempt):
            self.attempt = replace(self.attempt, digest=digest, blamed=())
            self.exchange_seconds = time.monotonic() - began
            self._wake()

    def _begin_encoding(self, encoded: tuple[int, int]) -> None:
        """The contribution is about to be encoded for a round cut in this way, from the residual as it was before any encoding of it."""
        with self._encoding:
            if self._encoded != encoded:
                self.state.settle(self.index, landed=False)
                self.state.set_aside(self.index)
                self._encoded = encoded

    def _end_encoding(self, landed: bool) -> None:
        with self._encoding:
            self.state.settle(self.index, landed=landed)
            self._encoded = None

    async def _fetch(self, number: int, digest: str) -> None:
        """Take the committed average from whoever holds it."""
        round_ = self.board.rounds[self.index].record
        peers = {
            name: seen.record.address
            for name, seen in self.board.members.items()
            if name != self.cluster and seen.record.address and self._has(seen.record.rounds, number, name, round_)
        }
        members = round_.participants if round_.number == number else round_.before
        weights: tuple[float, ...] | None = ()
        if self.codec.gathers:  # a record that was made anew does not name who was before
            weights = tuple(contribution_weights(self.table, [p.tokens for p in members])) if members else None
        await self.exchange.fetch_result(
            self.index, number, digest, start=self.start, size=self.stop - self.start, peers=peers, weights=weights
        )

    def _has(self, rounds: tuple[int, ...], number: int, name: str, record: RoundRecord) -> bool:
        applied = rounds[self.index] if self.index < len(rounds) else 0
        return applied >= number or any(p.cluster == name for p in (*record.participants, *record.before))

    # --- the outer step

    async def apply(self, number: int, digest: str, contributed: bool) -> None:
        """The outer step of a committed round whose average is on disk, and all that follows from it."""
        landed, late = contributed, not (contributed and self.own)
        result = await asyncio.to_thread(self.exchange.result, self.index, number, digest)
        async with self._lock:
            told = await self.workers.release(self.index) if late else True
            shift = not landed and self.prepared is not None
            if shift:
                await self._insist(lambda: asyncio.to_thread(self.journal.moves, self.index, number))
            await asyncio.gather(
                asyncio.to_thread(self.state.apply, self.index, number, result, shift=shift),
                self._insist(lambda: asyncio.to_thread(result.spool.sync)),
            )
            await self._insist(lambda: asyncio.to_thread(self.journal.applied, self.index, number, digest, landed=landed))
            self.prepared = None if landed else after_applying(self.prepared, number, self.state.fragments[self.index].digest)
            if self.attempt is not None and self.attempt.round <= number:
                self._cease()
            self._end_encoding(landed)
            self._trained_since = time.monotonic()
            if told:
                seen = self.board.rounds.get(self.index)
                step = (
                    seen.record.step if seen is not None and (seen.record.number, seen.record.digest) == (number, digest) else 0
                )
                await self.workers.merge(self.index, number, late=late, landed=landed, step=step)
        log.info("fragment %d: round %d applied%s", self.index, number, "" if landed else ", without a contribution of ours")
        await self._committed(self.index, number)

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what cannot be left half done, however long the disk refuses."""
        while True:
            try:
                return await work()
            except DiskError as error:
                self._complain("the disk", error)
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Stop everything that is under way."""
        self._cease()
        await end(self._running.values())
