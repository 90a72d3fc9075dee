"""The exchange: one cluster's side of every attempt that it takes part in.

For every chunk a cluster sends its contribution to the chunk's owner, and the owner sends the average to everybody as soon as it has it: nobody
waits for an answer before the next chunk goes. Each cluster begins at another owner, so that they do not all queue at the same one. The
owner's work is in `reduction`; how chunks travel in `links`, `outbox` and `assembly`; what others may ask in `server`, blame in `peers`, files in `spool`.

An attempt never fails by itself: it goes on until it is whole or the caller cancels it, because the protocol, which sees all clusters, has
made another one. What an owner has received stays for that one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from isles.codec import Codec, check
from isles.errors import MALFORMED, CheckpointError, CodecError, IslesError, NetworkError, first_failure
from isles.exchange.frames import Head, Kind
from isles.exchange.links import Links
from isles.exchange.packing import pack
from isles.exchange.peers import ERRORS, PATIENCE, Peers, TooEarly, addresses
from isles.exchange.rate import Counters, RateCap
from isles.exchange.reduction import Inbox, OwnerReduction
from isles.exchange.server import EARLY, LONG_POLL, Reduction, Refused, Server
from isles.exchange.speed import LineSpeed
from isles.exchange.spool import Averages, Manifest, Spool, StoredAverage, chunk_digest, unbundle
from isles.exchange.task import Contribution, Task, largest_result
from isles.spec import OuterTable

log = logging.getLogger("isles.exchange")

Send = Callable[[int], tuple[bytes | memoryview, int, bytes]]  # chunk -> what travels, bytes of the chunk itself, its digest
AGAIN = 1.0  # seconds between two questions to an owner that has nothing yet
MAX_MANIFEST = 64 << 20  # bytes: 100 a chunk, and 50 billion values have 48,000 chunks


@dataclass
class Running:
    """An attempt under way, or whole and still asked for by others."""

    task: Task
    reduction: OwnerReduction
    since: float
    whole: bool = False
    missing: dict[str, set[int]] = field(default_factory=dict)  # averages that have not come, by owner
    all_here: asyncio.Event = field(default_factory=asyncio.Event)  # none is missing
    came: dict[str, float] = field(default_factory=dict)  # when an owner's last average came
    giving: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # own averages to the others, by name
    reported: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # whom owners wait for: since when, and last heard of


class Exchange:
    """A cluster's exchange with the others of its run.

    Args:
        me, run: the cluster's name (that of its certificate) and the run's id.
        codec, table: how contributions are encoded and weighted.
        folder: where chunks lie on disk; averages in it are found again after a restart.
        server_ssl, client_ssl: contexts for mutual TLS with the run's certificates; peer_name: the cluster a certificate is of.
        max_upload: cap on everything sent, bytes/s.
    """

    def __init__(
        self, me: str, run: str, *, codec: Codec, table: OuterTable, folder: Path, server_ssl: ssl.SSLContext,
        client_ssl: ssl.SSLContext, peer_name: Callable[[ssl.SSLObject], str], max_upload: float | None = None,
    ) -> None:  # fmt: skip
        self.me, self.run = me, run
        self._codec, self._table, self._folder = codec, table, folder
        self.counters, self.cap = Counters(), RateCap(max_upload)
        self.averages = Averages(folder / "averages")
        for inbox in folder.glob("f*-r*-c*"):  # of rounds that a kill cut off
            shutil.rmtree(inbox, ignore_errors=True)
        self.speed = LineSpeed()
        self._measuring: asyncio.Task[None] | None = None
        self.peers = Peers(client_ssl, self.cap, self.counters, self.speed)
        self.links = Links(me, run, self.peers, self._welcome, self._arrived)
        self.server = Server(
            run,
            server_ssl,
            peer_name,
            self._find,
            self.links.carry,
            self.averages,
            self.cap,
            self.counters,
            self.speed,
            self._coming,
        )
        self._running: dict[int, Running] = {}
        self._inboxes: dict[tuple[int, int, int], Inbox] = {}  # by fragment, round, values in a chunk
        self._begun = asyncio.Condition()
        self._fetched: dict[tuple[int, int, str], Spool] = {}
        self._residual_lock = threading.Lock()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises NetworkError when the address cannot be had."""
        await self.peers.start()
        try:
            self._measuring = asyncio.create_task(self.speed.run(self.cap, self.links.waiting), name="line speed")
            return await self.server.start(host, port)
        except NetworkError:
            await self.stop()
            raise

    async def stop(self) -> None:
        tasks = [task for running in self._running.values() for task in running.giving.values()]
        if self._measuring is not None:
            tasks.append(self._measuring)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.stop()
        await self.peers.stop()
        await self.server.stop()

    async def warm(self, peers: Mapping[str, str | None]) -> None:
        """Have lanes with these clusters, and with no others; they are about to be needed."""
        self.links.keep(peers, only=True)
        await self.links.ready(peers, PATIENCE)

    # --- an attempt

    async def exchange(self, task: Task, contribution: Contribution) -> str:
        """Take part in an attempt until the whole average is on disk; returns its digest.

        contribution: encodes one chunk of this cluster's own, in a worker thread. Raises DiskError, CodecError (the own contribution is not
        finite); what goes wrong between machines is tried again until the caller cancels this."""
        running = self._begin(task, contribution)
        async with self._begun:
            self._begun.notify_all()
        send = self._sender(task, contribution)
        self.links.keep(task.peers)
        for name in task.participants:
            if name != self.me and task.owned_by(self.me):
                running.giving[name] = asyncio.create_task(self._give(running, name), name=f"averages to {name}")
        with first_failure():
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(work)
                    for owner, address in self._owners(task)
                    for work in (self._contribute(task, owner, address, send), self._watch(running, owner, address))
                ]
                await running.reduction.finished()
                await running.all_here.wait()
                for helper in helpers:
                    helper.cancel()
        average = await asyncio.to_thread(self._keep, task, running)
        running.whole = True
        return average.manifest.digest

    def _begin(self, task: Task, contribution: Contribution) -> Running:
        fragment, number = task.key
        for name in task.participants:
            self.peers.health(name).refused = False  # it may be another process by now, at another address
        earlier = self._running.get(fragment)
        if earlier is not None:
            earlier.reduction.close()
            for giving in earlier.giving.values():
                giving.cancel()
            if not self.averages.keeps(earlier.reduction.averages):
                earlier.reduction.averages.delete()
        self.links.drop(lambda head: head.fragment == fragment)
        mine = (*task.key, task.record.chunk)  # a round that was opened again may be cut in another way
        for key in [k for k in self._inboxes if k[0] == fragment and k != mine]:
            self._inboxes.pop(key).delete()
        inbox = self._inboxes.get(mine)
        if inbox is None:
            folder = self._folder / f"f{fragment}-r{number}-c{task.record.chunk}"
            inbox = self._inboxes[mine] = Inbox(folder, self._codec.encoded_size(task.record.chunk))
        path = self._folder / "averages" / f"f{fragment}-r{number}-a{task.record.attempt}.spool"
        spool = Spool(path, task.result_limit(self._codec))
        own = self._own(task, contribution)
        reduction = OwnerReduction(task, self.me, self._codec, self._table, inbox, spool, lambda chunk: bytes(own(chunk)))
        running = Running(task, reduction, time.monotonic())
        running.missing = {owner: set(task.owned_by(owner)) for owner in set(task.owners.values()) - {self.me}}
        if not running.missing:
            running.all_here.set()
        self._running[fragment] = running
        return running

    def _own(self, task: Task, contribution: Contribution) -> Callable[[int], bytes | memoryview]:
        """The own contribution's chunks. Encoding with a residual changes the residual, so it is done once a round and kept."""
        if not self._codec.needs_residual:
            return contribution
        spool = self._inboxes[*task.key, task.record.chunk].of((self.me, task.participants[self.me].incarnation))

        def once(chunk: int) -> bytes:
            with self._residual_lock:
                if chunk not in spool:
                    body = contribution(chunk)
                    spool.put(chunk, body, chunk_digest(body))
            return spool.get(chunk)

        return once

    def _sender(self, task: Task, contribution: Contribution) -> Send:
        own = self._own(task, contribution)

        def encode(chunk: int) -> tuple[bytes | memoryview, int, bytes]:
            body = own(chunk)
            return self._packed(body), len(body), chunk_digest(body)

        return encode

    def _packed(self, body: bytes | memoryview) -> bytes | memoryview:
        return body if self.speed.fast else pack(body)

    def _owners(self, task: Task) -> list[tuple[str, str]]:
        """The other owners with their addresses, beginning after this cluster's own place."""
        reachable = addresses(task.peers, self.me)
        owners = [(name, reachable[name]) for name in sorted(set(task.owners.values())) if name in reachable]
        first = sum(name < self.me for name, _ in owners)
        return owners[first:] + owners[:first]

    async def _contribute(self, task: Task, owner: str, address: str, send: Send) -> None:
        """Send an owner what it reduces."""
        held = await self._held_there(task, owner, address) if task.record.attempt else set()
        fragment, number = task.key
        for chunk in task.owned_by(owner):
            if chunk not in held:
                packed, whole, digest = await asyncio.to_thread(send, chunk)
                who = task.participants[self.me].incarnation
                head = Head(Kind.CONTRIBUTION, fragment, number, task.record.attempt, chunk, len(packed), whole, digest, who)
                await self.links.post(owner, head, packed)

    async def _give(self, running: Running, peer: str) -> None:
        """Send a participant the averages of the own chunks, as they are made, for as long as it lacks them."""
        task, (fragment, number) = running.task, running.task.key
        try:
            async for chunk in running.reduction.made():
                body, digest = await running.reduction.average(chunk)
                packed = await asyncio.to_thread(self._packed, body)
                head = Head(Kind.AVERAGE, fragment, number, task.record.attempt, chunk, len(packed), len(body), digest)
                await self.links.post(peer, head, packed)
        except IslesError as error:
            log.warning("round %d: an average for %s: %s", number, peer, error)  # it asks for it, by and by

    def _coming(self, peer: str, reduction: Reduction, chunk: int) -> bool:
        """Whether an average of this cluster's is on its way to a peer, or about to be."""
        running = next((r for r in self._running.values() if r.reduction is reduction), None)
        if running is None or peer not in running.giving or not self.links.of(peer).lanes:
            return False
        fragment, number = running.task.key
        key = (Kind.AVERAGE, fragment, number, running.task.record.attempt, chunk)
        return not running.giving[peer].done() or self.links.of(peer).outbox.has(key)

    async def _held_there(self, task: Task, owner: str, address: str) -> set[int]:
        """Chunks of this cluster's contribution that an owner has from an earlier attempt."""
        path = f"{self._path(task)}/contributions/{self.me}/{task.participants[self.me].incarnation}"
        answer = await self.peers.get(owner, address, path, MAX_MANIFEST, "contributions")
        try:
            return {int(chunk) for chunk in json.loads(answer.body)}
        except MALFORMED:
            return set()

    async def _watch(self, running: Running, owner: str, address: str) -> None:
        """Ask an owner of whom nothing comes for whom it waits, and get the average itself where it has it after all."""
        task = running.task
        while missing := running.missing[owner]:
            quiet = running.came.get(owner, running.since) + LONG_POLL / 2 - time.monotonic()
            if quiet > 0:
                await asyncio.sleep(quiet)
                continue
            chunk = min(missing)
            path, limit = f"{self._path(task)}/{task.record.attempt}/averages/{chunk}", task.result_limit(self._codec)
            answer = await self.peers.get(owner, address, path, limit, "averages")
            if answer.status == 202:
                self._note_missing(running, owner, answer.body)
                await asyncio.sleep(AGAIN)
                continue
            try:
                if chunk_digest(answer.body).hex() != answer.digest:
                    raise CodecError(f"chunk {chunk} arrived damaged: it does not match its hash")
                await asyncio.to_thread(self._take, task, chunk, answer.body, running.reduction.averages)
                self._note_average(running, owner, chunk)
            except (CodecError, CheckpointError) as error:
                log.warning("%s at %s sent a bad average: %s", owner, address, error)
                await asyncio.sleep(1.0)

    # --- what others send over lanes

    async def _welcome(self, peer: str, head: Head) -> bool:
        """Whether a chunk is here already. Raises Refused when it may not come, so that no memory is taken for it."""
        if head.kind is Kind.CONTRIBUTION:
            reduction = await self._find(head.fragment, head.number, None)
            size = reduction.expects(peer, head.incarnation, head.chunk)
            if head.whole != size:
                raise Refused(413, f"chunk {head.chunk} takes {size} bytes, not {head.whole}")
            return reduction.holds(peer, head.chunk)
        reduction = await self._find(head.fragment, head.number, head.attempt)
        if reduction.task.owners.get(head.chunk) != peer:
            raise Refused(409, f"{peer} does not own chunk {head.chunk}")
        if head.whole > reduction.task.result_limit(self._codec):
            raise Refused(413, f"no average of a chunk takes {head.whole} bytes")
        return head.chunk in reduction.averages

    async def _arrived(self, peer: str, head: Head, body: bytes) -> None:
        """A welcome chunk is whole. Raises Refused, CodecError, DiskError."""
        if head.kind is Kind.CONTRIBUTION:
            reduction = await self._find(head.fragment, head.number, None)
            reduction.expects(peer, head.incarnation, head.chunk)
            self.counters.down["contributions"] += head.size
            await reduction.receive(peer, head.chunk, body, head.digest)
            return
        reduction = await self._find(head.fragment, head.number, head.attempt)
        self.counters.down["averages"] += head.size
        await asyncio.to_thread(self._take, reduction.task, head.chunk, body, reduction.averages)
        running = self._running.get(head.fragment)
        if running is not None and running.reduction is reduction:
            self._note_average(running, peer, head.chunk)

    def _note_average(self, running: Running, owner: str, chunk: int) -> None:
        running.missing[owner].discard(chunk)
        running.came[owner] = time.monotonic()
        running.reported.pop(owner, None)
        if not any(running.missing.values()):
            running.all_here.set()

    def _take(self, task: Task, chunk: int, body: bytes, spool: Spool) -> None:
        """Keep an average that is what it should be. Raises CodecError, CheckpointError, DiskError."""
        first, stop = task.bounds(chunk)
        self._check(body, first, stop, len(task.participants))
        spool.put(chunk, body, chunk_digest(body))

    def _check(self, body: bytes, first: int, stop: int, participants: int) -> None:
        for part in unbundle(body, participants) if self._codec.gathers else [body]:
            header = check(part)
            if (header.codec, header.offset, header.stop) != (self._codec.name, first, stop):
                raise CodecError(
                    f"it holds {header.codec} values {header.offset} to {header.stop} instead of {first} to {stop}"
                )

    def _note_missing(self, running: Running, owner: str, body: bytes) -> None:
        """An owner says for whom it waits; one that waits for nobody, and of whom no average comes, is held up itself."""
        now = time.monotonic()
        try:
            missing = [str(name) for name in json.loads(body)["missing"]]
        except MALFORMED:
            return
        for name in missing or [owner]:
            if name in running.task.participants:
                since, last = running.reported.get(name, (now, now))
                running.reported[name] = (since if now - last < 3 * LONG_POLL else now, now)

    def _keep(self, task: Task, running: Running) -> StoredAverage:
        weights = tuple(task.weights(self._table)) if self._codec.gathers else ()
        fragment, number = task.key
        return self.averages.add(running.reduction.averages, fragment, number, task.record.chunk, task.size, weights)

    def _path(self, task: Task) -> str:
        fragment, number = task.key
        return f"/v1/{self.run}/{fragment}/{number}"

    async def _find(self, fragment: int, number: int, attempt: int | None) -> OwnerReduction:
        """The reduction that a request is about; waits a little for it. Raises Refused."""
        deadline = time.monotonic() + EARLY
        while True:
            running = self._running.get(fragment)
            if running is not None:
                record = running.task.record
                if record.number > number or (record.number == number and attempt is not None and record.attempt > attempt):
                    raise Refused(410, f"round {number} of fragment {fragment} is over here")
                if record.number == number and (attempt is None or record.attempt == attempt):
                    return running.reduction
            async with self._begun:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._begun.wait()
                except TimeoutError:
                    raise Refused(425, f"round {number} of fragment {fragment} has not begun here") from None

    # --- blame

    def blamed(self, fragment: int) -> tuple[str, ...]:
        """Participants that hold the fragment's attempt up, as far as this cluster can tell."""
        running = self._running.get(fragment)
        if running is None or running.whole:
            return ()
        guilty = {
            owner for owner, chunks in running.missing.items() if chunks and self.peers.health(owner).stuck(running.since)
        }
        now, loop_now = time.monotonic(), asyncio.get_running_loop().time()
        for name in running.reduction.waits_for():
            health, heard = self.peers.health(name), running.reduction.heard.get(name, running.since)
            if health.refused or loop_now - heard > health.patience():
                guilty.add(name)
        for name, (since, last) in running.reported.items():
            if now - last < 2 * LONG_POLL and now - since > self.peers.health(name).patience():
                guilty.add(name)
        return tuple(sorted(guilty - {self.me}))

    # --- averages of rounds that are over

    def result(self, fragment: int, number: int, digest: str) -> StoredAverage:
        """A whole average on disk; iterating gives its decoded chunks. Raises CheckpointError when it is not there, or was altered."""
        return self.averages.checked(fragment, number, digest)

    async def fetch_result(
        self, fragment: int, number: int, digest: str, *, start: int, size: int, peers: Mapping[str, str | None],
        weights: tuple[float, ...] | None = (),
    ) -> None:  # fmt: skip
        """Get a committed average from whoever holds it, from several at once; goes on where an earlier call was cut.

        start, size: of the fragment; weights: of the contributions, for codecs that gather; None: as who gives it says (the round's record is
        gone). Raises NetworkError when nobody gives it."""
        path = f"/v1/{self.run}/{fragment}/{number}/results/{digest}"
        reachable = addresses(peers, self.me)
        manifest = await self._manifest(path, reachable, size, digest, weights)
        weights = manifest.weights if weights is None else weights
        key = (fragment, number, digest)
        spool = self._fetched.get(key)
        if spool is None:
            name = f"f{fragment}-r{number}-{digest[:16]}.spool"
            spool = self._fetched[key] = Spool(self._folder / "averages" / name, manifest.sizes[0])
        missing = [chunk for chunk in range(len(manifest.sizes)) if chunk not in spool]
        queue = iter(missing)
        with first_failure():
            async with asyncio.TaskGroup() as group:
                for name, address in reachable.items():
                    group.create_task(self._fetch_from(name, address, path, queue, manifest, spool, start, len(weights)))
        if any(chunk not in spool for chunk in missing):
            raise NetworkError(f"round {number} of fragment {fragment}: no other cluster gave all of its average; trying again")
        self.averages.add(spool, fragment, number, manifest.chunk, size, weights)
        self._fetched.pop(key, None)

    async def _manifest(
        self, path: str, peers: Mapping[str, str], size: int, digest: str, weights: tuple[float, ...] | None
    ) -> Manifest:  # fmt: skip
        """The description of an average, from the first who gives one that can be true."""
        for name, address in peers.items():
            try:
                answer = await self.peers.get_once(name, address, path, MAX_MANIFEST, "results")
                manifest = Manifest.from_json(answer.body)
            except (*ERRORS, TooEarly, CheckpointError):
                continue
            parts = len(manifest.weights if weights is None else weights)
            most = largest_result(self._codec, manifest.chunk, parts)  # the digest does not cover the sizes
            if manifest.digest == digest and manifest.size == size and max(manifest.sizes) <= most:
                return manifest
        raise NetworkError(f"no cluster that can be reached holds the average {digest[:12]}; trying again")

    async def _fetch_from(
        self, peer: str, address: str, path: str, chunks: Iterator[int], manifest: Manifest, spool: Spool, start: int, parts: int
    ) -> None:  # fmt: skip
        for chunk in chunks:
            try:
                answer = await self.peers.get_once(peer, address, f"{path}/{chunk}", manifest.sizes[chunk], "results")
                actual = chunk_digest(answer.body)
                if actual.hex() != manifest.digests[chunk]:
                    raise CodecError(f"{peer} at {address} sent chunk {chunk} damaged")
                first = start + chunk * manifest.chunk
                self._check(answer.body, first, min(first + manifest.chunk, start + manifest.size), parts)
                await asyncio.to_thread(spool.put, chunk, answer.body, actual)
            except (*ERRORS, TooEarly, CodecError, CheckpointError) as error:
                log.warning("%s at %s: %s", peer, address, error)
                return  # the others go on; what is missing is asked for again

    def forget(self, fragment: int, before: int) -> None:
        """Delete what is kept of the rounds before this one."""
        self.averages.forget(fragment, before)
        for cut in [k for k in self._fetched if k[0] == fragment and k[1] < before]:
            self._fetched.pop(cut).delete()  # nobody gave all of it, and now nobody needs it
        for key in [k for k in self._inboxes if k[0] == fragment and k[1] < before]:
            self._inboxes.pop(key).delete()
