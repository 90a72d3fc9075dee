"""The owner's work in an attempt: contributions of its parts in, averages out, chunk by chunk.

A chunk is averaged as soon as all its contributions are there, always in the order of the clusters' names, so that the average has the
same bits whoever makes it; it is encoded once, and the owner, too, uses what it decodes from that. Received contributions lie in one
file for each sender and stay for the round's next attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from isles.codec import Codec, check, decode_accumulate
from isles.errors import CodecError
from isles.exchange.server import Refused
from isles.exchange.spool import Spool, bundle, chunk_digest
from isles.exchange.task import Task
from isles.spec import OuterTable

Sender = tuple[str, str]  # cluster, incarnation


class Inbox:
    """What arrived for one round of one fragment, over all its attempts, by sender. arrived: is told of every chunk, in the event loop; a chunk
    whose sending began in an earlier attempt may arrive in a later one."""

    def __init__(self, folder: Path, slot: int) -> None:
        self._folder, self._slot = folder, slot
        self.arrived: Callable[[int], None] = lambda _chunk: None
        self._spools: dict[Sender, Spool] = {}

    def of(self, sender: Sender) -> Spool:
        """The chunks of one sender; its own file."""
        if sender not in self._spools:
            self._spools[sender] = Spool(self._folder / f"{sender[0]}-{sender[1]}.spool", self._slot)
        return self._spools[sender]

    def delete(self) -> None:
        for spool in self._spools.values():
            spool.delete()
        self._spools.clear()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class OwnerReduction:
    """One attempt, as the owner of some chunks (perhaps none). averages: where the encoded averages go, those of other owners too."""

    def __init__(
        self, task: Task, me: str, codec: Codec, table: OuterTable, inbox: Inbox, averages: Spool, own: Callable[[int], bytes]
    ) -> None:  # fmt: skip
        self.task, self.me, self._codec = task, me, codec
        self._inbox, self.averages, self._own = inbox, averages, own
        self._weights = task.weights(table)
        self._ready = {chunk: asyncio.Event() for chunk in task.owned_by(me)}
        self._made: dict[int, asyncio.Task[None]] = {}
        self._finished: list[int] = []  # chunks that are averaged, in that order
        self._news = asyncio.Event()
        self.heard: dict[str, float] = {}  # when a sender's last chunk arrived
        inbox.arrived = self._look
        for chunk in self._ready:
            self._look(chunk)

    # --- what the server asks

    def expects(self, cluster: str, incarnation: str, chunk: int) -> int:
        """Bytes of a chunk that this sender may put here. Raises Refused."""
        participant = self.task.participants.get(cluster)
        if participant is None or participant.incarnation != incarnation:
            raise Refused(409, f"{cluster} as {incarnation} takes no part in this attempt")
        if chunk not in self._ready:
            raise Refused(409, f"{self.me} does not own chunk {chunk}")
        return self._codec.encoded_size(self.task.count(chunk))

    def holds(self, cluster: str, chunk: int) -> bool:
        return chunk in self._inbox.of(self._sender(cluster))

    def received(self, cluster: str, incarnation: str) -> list[int]:
        participant = self.task.participants.get(cluster)
        if participant is None or participant.incarnation != incarnation:
            return []
        return sorted(self._inbox.of(self._sender(cluster)).sizes)

    def missing(self, chunk: int) -> list[str]:
        """Participants whose contribution to a chunk is not here."""
        return [name for name in self.task.participants if name != self.me and not self.holds(name, chunk)]

    async def receive(self, cluster: str, chunk: int, body: bytes, digest: bytes) -> None:
        """Take a chunk in. Raises CodecError when it does not decode to finite values of the right place."""
        await asyncio.to_thread(self._store, cluster, chunk, body, digest)
        self.heard[cluster] = asyncio.get_running_loop().time()
        self._inbox.arrived(chunk)  # perhaps of the next attempt by now

    def _store(self, cluster: str, chunk: int, body: bytes, digest: bytes) -> None:
        header = check(body)
        first, stop = self.task.bounds(chunk)
        if (header.codec, header.offset, header.stop) != (self._codec.name, first, stop):
            raise CodecError(
                f"{cluster} sent {header.codec} values {header.offset} to {header.stop} as chunk {chunk}: refuse it"
            )
        self._inbox.of(self._sender(cluster)).put(chunk, body, digest)

    async def average(self, chunk: int) -> tuple[bytes, bytes]:
        """The encoded average of an owned chunk and its digest, once it is there. Raises Refused."""
        if chunk not in self._ready:
            raise Refused(409, f"{self.me} does not own chunk {chunk}")
        await self._ready[chunk].wait()
        if chunk in self._made:
            await asyncio.shield(self._made[chunk])
        return await asyncio.to_thread(self.averages.get, chunk), self.averages.digests[chunk]

    # --- the work

    def _look(self, chunk: int) -> None:
        """Average a chunk if all its contributions are here."""
        if chunk in self._ready and chunk not in self._made and not self.missing(chunk):
            self._made[chunk] = asyncio.create_task(self._make(chunk))
            self._ready[chunk].set()

    async def _make(self, chunk: int) -> None:
        await asyncio.to_thread(self._reduce, chunk)
        self._finished.append(chunk)
        self._news.set()

    def _reduce(self, chunk: int) -> None:
        parts = [
            self._own(chunk) if name == self.me else self._inbox.of(self._sender(name)).get(chunk)
            for name in self.task.participants
        ]
        if self._codec.gathers:
            body: bytes | memoryview = bundle(parts)
        else:
            mean = np.zeros(self.task.count(chunk), np.float32)
            for part, weight in zip(parts, self._weights, strict=True):
                decode_accumulate(part, weight, mean)
            body = self._codec.encode(mean, offset=self.task.bounds(chunk)[0], seed=self.task.seed)
        self.averages.put(chunk, body, chunk_digest(body))

    async def made(self) -> AsyncIterator[int]:
        """All owned chunks, each when it is averaged. Any number may listen."""
        at = 0
        while at < len(self._ready):
            while at < len(self._finished):
                at += 1
                yield self._finished[at - 1]
            if at < len(self._ready):
                self._news.clear()
                await self._news.wait()

    async def finished(self) -> None:
        """Returns when all owned chunks are averaged. Raises what went wrong in one."""
        for chunk, event in self._ready.items():
            await event.wait()
            await asyncio.shield(self._made[chunk])

    def waits_for(self) -> set[str]:
        """Senders of whom something is missing."""
        return {name for chunk in self._ready if chunk not in self._made for name in self.missing(chunk)}

    def close(self) -> None:
        for task in self._made.values():
            task.cancel()

    def _sender(self, cluster: str) -> Sender:
        return cluster, self.task.participants[cluster].incarnation
