"""Lanes to the other clusters: several connections to each, made before they are needed, and made again when one is lost.

A lane carries frames (`frames`) both ways, whoever made it; so a cluster that cannot be reached from outside gets what it is owed over the lanes
that it made itself. Of two clusters that reach each other the one whose name comes first makes the lanes, and the other only when none come.
What is to be sent lies in one outbox for each peer (`outbox`), from which its lanes take piece by piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from aiohttp import ClientWebSocketResponse, WSMsgType, web

from isles.exchange.assembly import Assemblies, Finish, Gate
from isles.exchange.frames import TAKEN, Head, Kind, Piece, Receipt, Receipts, Verdict, parse
from isles.exchange.kernel import room
from isles.exchange.outbox import Outbox
from isles.exchange.peers import ERRORS, Pause, Peers, congestion
from isles.exchange.rate import Purpose

log = logging.getLogger("isles.exchange")

WebSocket = web.WebSocketResponse | ClientWebSocketResponse
FEW, MANY, LEAST = (
    4,
    32,
    2,
)  # lanes to one peer where the congestion control keeps a line full, over all peers where it does not, and at least to one
MOST = 64  # lanes that one peer may have here
BACKLOG = 1 << 20  # bytes of a peer's that wait for a lane before more is encoded
TICK = 0.05  # seconds between two looks at what is overdue or was put off
NARROW, SOON = 2 * 1448, 0.005  # bytes of room that are too few for a piece, and seconds until the next look
PATIENT = 1.0  # seconds without a lane after which the one whose place it is not makes them too
DIALLING = (
    2.0,
    10.0,
)  # seconds that making a lane may take: the first time, and at most; on a dead line a new try is sooner than TCP's


def lanes_for(peers: int) -> int:
    """Lanes to each of so many peers. Two streams of BBR keep a long lossy line full; of what most kernels have by default many are needed, each
    of which begins slowly and halves at a loss."""
    most = FEW if congestion() == "bbr" else MANY
    return max(LEAST, most if most == FEW and peers <= 8 else most // max(1, peers))


@dataclass(eq=False)
class Link:
    """All lanes with one peer. address: None where it cannot be reached; first: whether this cluster makes the lanes."""

    peer: str
    outbox: Outbox
    inbox: Assemblies
    address: str | None = None
    first: bool = True
    want: int = LEAST
    lanes: dict[int, asyncio.Task[None] | None] = field(default_factory=dict)
    alone_since: float = field(default_factory=time.monotonic)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None


class Links:
    """Lanes to all peers. gate, finish: what becomes of a chunk that a peer sends (`assembly`)."""

    def __init__(self, me: str, run: str, peers: Peers, gate: Gate, finish: Finish) -> None:
        self.me, self.run, self.peers = me, run, peers
        self._gate, self._finish = gate, finish
        self._links: dict[str, Link] = {}
        self._numbers = itertools.count(1)
        self._carrying: set[asyncio.Task[None]] = set()

    def of(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            outbox = Outbox()

            def tell(what: Receipt | Verdict) -> None:
                outbox.tell(what)
                made.work.set()

            made = link = self._links[peer] = Link(peer, outbox, Assemblies(peer, self._gate, self._finish, tell))
        return link

    # --- having lanes

    def keep(self, peers: Mapping[str, str | None], *, only: bool = False) -> None:
        """Have lanes with these clusters, by name, this one among them with the address at which others reach it. only: and with no others."""
        reachable = peers.get(self.me) is not None
        others = {name: address for name, address in peers.items() if name != self.me}
        for name, address in others.items():
            link = self.of(name)
            link.address, link.want = address, lanes_for(len(others))
            link.first = not reachable or self.me < name
            if address is not None and (link.keeper is None or link.keeper.done()):
                link.alone_since = time.monotonic()
                link.keeper = asyncio.create_task(self._keep(link), name=f"lanes to {name}")
        if only:
            for name in [name for name in self._links if name not in others]:
                self._close(self._links.pop(name))

    async def ready(self, peers: Mapping[str, str | None], seconds: float) -> None:
        """Wait until there are lanes with all of these, but not longer than so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(not self.of(name).lanes for name in peers if name != self.me):
                    await asyncio.sleep(TICK)

    async def _keep(self, link: Link) -> None:
        """Make lanes while there are too few."""
        pause, limit = Pause(), DIALLING[0]
        while True:
            missing = link.want - len(link.lanes)
            ours = link.first or (not link.lanes and time.monotonic() - link.alone_since > PATIENT)
            if missing <= 0 or not ours or link.address is None:
                await asyncio.sleep(TICK)
                continue
            alone = not link.lanes  # then one finds out whether the peer is there
            made = await asyncio.gather(*(self._dial(link, link.address, limit) for _ in range(1 if alone else missing)))
            if all(made):
                pause, limit = Pause(), DIALLING[0]
            else:
                limit = min(DIALLING[1], limit * 2)
                await pause.wait()

    async def _dial(self, link: Link, address: str, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                lane = await self.peers.lane(link.peer, address, f"/v1/{self.run}/lane")
        except ERRORS as error:
            self.peers.failed(link.peer, address, error)
            return False
        carrying = asyncio.create_task(self.carry(link.peer, lane), name=f"lane to {link.peer}")
        self._carrying.add(carrying)
        carrying.add_done_callback(self._carrying.discard)
        await asyncio.sleep(0)  # it counts from now on
        return True

    async def carry(self, peer: str, lane: WebSocket) -> None:
        """Send and take frames until the lane is lost."""
        link, number = self.of(peer), next(self._numbers)
        if len(link.lanes) >= MOST:
            await lane.close(message=b"too many lanes")
            return
        link.lanes[number] = asyncio.current_task()
        self.peers.health(peer).alive()
        ways = [asyncio.create_task(self._read(link, lane)), asyncio.create_task(self._send(link, lane, number))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            link.lanes.pop(number, None)
            link.alone_since = time.monotonic()
            link.outbox.lost(number)
            link.work.set()
            for result in await asyncio.gather(*ways, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, ERRORS):
                    log.error("a lane to %s: %r", peer, result)
            with contextlib.suppress(*ERRORS):
                await lane.close()

    def _close(self, link: Link) -> None:
        if link.keeper is not None:
            link.keeper.cancel()
        link.inbox.close()
        for task in list(link.lanes.values()):
            if task is not None:
                task.cancel()

    async def stop(self) -> None:
        """Close all lanes."""
        tasks = [task for link in self._links.values() for task in (*link.lanes.values(), link.keeper) if task is not None]
        for link in self._links.values():
            self._close(link)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what goes over them

    async def post(self, peer: str, head: Head, body: bytes | memoryview) -> None:
        """Have a chunk sent; waits while much is waiting already."""
        link = self.of(peer)
        while link.outbox.unsent >= BACKLOG:
            link.room.clear()
            await link.room.wait()
        link.outbox.post(head, body)
        link.work.set()

    def waiting(self) -> float | None:
        """For how long packets wait on their way to the others, in seconds; None while nothing comes there."""
        now = time.monotonic()
        waits = [waits for link in self._links.values() if (waits := link.outbox.way.waiting(now)) is not None]
        return median(waits) if waits else None

    def drop(self, over: Callable[[Head], bool]) -> None:
        """Forget what is still to be sent of these."""
        for link in self._links.values():
            link.outbox.drop(over)
            link.room.set()

    async def _send(self, link: Link, lane: WebSocket, number: int) -> None:
        cap, outbox = self.peers.cap, link.outbox
        while True:
            if (answer := outbox.answer()) is not None:
                await lane.send_bytes(answer)
                continue
            free = room(lane)  # what is taken beyond it lies here for round trips, while another lane could have it there
            if free < NARROW:
                await asyncio.sleep(SOON)
                continue
            async with cap.turn:
                piece = outbox.take(number, min(cap.piece(), free))
                if piece is not None:
                    await cap.take(len(piece.data))
            if piece is None:
                await self._idle(link)
                continue
            if outbox.unsent < BACKLOG:
                link.room.set()
            await lane.send_bytes(piece.frame(time.monotonic_ns() // 1000))
            purpose: Purpose = "contributions" if piece.head.kind is Kind.CONTRIBUTION else "averages"
            self.peers.counters.up[purpose] += len(piece.data)

    async def _idle(self, link: Link) -> None:
        """Until there is something to send, or something may be overdue."""
        link.work.clear()
        try:
            async with asyncio.timeout(TICK if link.outbox.waits else None):
                await link.work.wait()
        except TimeoutError:
            pass

    async def _read(self, link: Link, lane: WebSocket) -> None:
        health = self.peers.health(link.peer)
        async for message in lane:
            if message.type is not WSMsgType.BINARY:
                return
            try:
                frame = parse(message.data)
            except ValueError as error:
                self.peers.declined(link.peer, link.address or "its lane", 400, f"no frame ({error})")
                return
            if not isinstance(frame, Verdict) or frame.status in (TAKEN, 425):
                health.alive()
            match frame:
                case Piece():
                    await link.inbox.take(frame)
                case Receipts():
                    for piece in frame.pieces:
                        link.outbox.receipt(*piece)
                    link.work.set()
                case Verdict():
                    self._hear(link, frame)

    def _hear(self, link: Link, verdict: Verdict) -> None:
        ended = link.outbox.verdict(verdict)
        if ended is not None and verdict.status == TAKEN:
            self.peers.health(link.peer).moved(ended.seconds)
        elif ended is not None and verdict.status != 425:
            self.peers.declined(link.peer, link.address or "its lane", verdict.status, verdict.text)
        link.work.set()
