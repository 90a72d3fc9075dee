"""The samples of one cluster: claimed in the store for its workers, counted when a round is committed, given back when they are not trained."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from isles.agent.claims import Claims, Range
from isles.agent.journal import Journal
from isles.errors import DataError, DiskError, NetworkError
from isles.protocol import Board, RoundRecord, State
from isles.store import Store
from isles.worker.link import Claim, Need

log = logging.getLogger("isles.agent")

KEY = "ledger"
FREE_AFTER = 120.0  # seconds without a sign of life after which a cluster's samples are given to others


class Samples:
    """Args:
    cluster: its name. sequences: in the dataset; 0 when a script brings its own, of which nothing is counted. give: hands a claim to the workers.
    """

    def __init__(
        self, cluster: str, sequences: int, *, store: Callable[[], Store], board: Board, journal: Journal, give: Callable[[Claim], None]
    ) -> None:  # fmt: skip
        self.cluster, self.sequences = cluster, sequences
        self._store, self._board, self._journal, self._hand_over = store, board, journal, give
        self._needs: asyncio.Queue[Need] = asyncio.Queue()
        self._last: bytes | None = None  # the shared record as this process last saw it whole
        self._damaged_since: float | None = None

    def need(self, need: Need) -> None:
        """The workers will soon run short."""
        self._needs.put_nowait(need)

    async def serve(self) -> None:
        """Claim samples for the workers, one claim after the other, for ever."""
        while True:
            need = await self._needs.get()
            said = ""
            # the last claim that was taken may not have come to the workers
            while 0 <= need.number - self._journal.taken <= 1:
                try:
                    await self._claim(need)
                    break
                except (NetworkError, DiskError) as error:
                    if str(error) != said:
                        said = str(error)
                        log.warning("%s", error)
                    await asyncio.sleep(0.5)

    async def count(self, record: RoundRecord) -> None:
        """A round is committed. Raises NetworkError."""
        if not self.sequences:
            return
        await self._change(lambda claims: claims.count(record))

    async def give_back(self, keep: tuple[Range, ...]) -> None:
        """What an earlier process had claimed is free again, but for what it has trained. Raises NetworkError."""
        if not self.sequences:
            return
        await self._change(lambda claims: claims.free(self.cluster, keep, self._journal.taken))

    async def _claim(self, need: Need) -> None:
        now = time.monotonic()
        view, members = self._board.view(0, now), self._board.members
        active = [n for n, m in members.items() if m.record.state is State.ACTIVE and view.alive(n)]
        gone = [n for n, m in members.items() if n != self.cluster and now - m.since > FREE_AFTER]

        def change(claims: Claims) -> bool:
            freed = [claims.free(name) for name in gone]
            return claims.give(self.cluster, need.number, dict.fromkeys([*active, self.cluster], need.count)) or any(freed)

        claims = await self._change(change)
        if need.number > self._journal.taken:
            self._journal.claimed(need.number)
        self._hand_over(Claim(need.number, claims.ranges(self.cluster, need.number)))

    async def _change(self, change: Callable[[Claims], bool]) -> Claims:
        """Change the shared record by compare-and-set until it shows the change. Raises NetworkError."""
        while True:
            store = self._store()
            entry = await store.get(KEY)
            claims = self._read(entry.value) if entry else Claims.empty(self.sequences)
            if not change(claims) and self._damaged_since is None:
                return claims
            data = claims.pack()
            done = await (store.update(KEY, data, entry.revision) if entry else store.create(KEY, data))
            if done is not None:
                self._last, self._damaged_since = data, None
                return claims

    def _read(self, data: bytes) -> Claims:
        """The shared record. Every cluster may write it, so one that is damaged ends nobody: who has seen it whole puts that back, as if the
        store had lost what came after; when nobody does for long, it begins anew. Raises NetworkError meanwhile."""
        try:
            claims = Claims.parse(data)
            if claims.ledger.size != self.sequences:
                raise DataError(
                    f"the run's record of claimed samples counts {claims.ledger.size} sequences, not {self.sequences}"
                )
        except DataError as error:
            now = time.monotonic()
            self._damaged_since = self._damaged_since or now
            if self._last is not None:
                log.error("%s; putting back what it was before", error)
                return Claims.parse(self._last)
            if now - self._damaged_since < FREE_AFTER:
                raise NetworkError(f"{error}; waiting for a cluster that has seen it whole") from error
            log.error("%s, and nobody has seen it whole; it begins anew, so that some samples are trained twice", error)
            return Claims.empty(self.sequences)
        self._last, self._damaged_since = data, None
        return claims
