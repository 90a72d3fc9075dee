"""Chunks that one peer sends, put together from pieces that come in any order over any lane.

Whether a chunk is welcome, and how long it may be, is asked once, before memory is taken for it; all its pieces wait for the answer, and the
lanes that bring them with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from isles.errors import CodecError, IslesError
from isles.exchange.frames import TAKEN, Head, Piece, Receipt, Verdict
from isles.exchange.packing import unpack
from isles.exchange.server import Refused
from isles.exchange.spool import chunk_digest

OPEN = 32  # chunks of one peer at once
STALE = 60.0  # seconds without a piece after which a chunk no longer counts

Gate = Callable[[str, Head], Awaitable[bool]]  # peer, head -> whether it is here already; raises Refused
Finish = Callable[[str, Head, bytes], Awaitable[None]]  # peer, head, body; raises Refused, IslesError


@dataclass(eq=False)
class Assembly:
    """A chunk that is coming. gate: whether it is welcome."""

    gate: asyncio.Future[bool]
    body: bytearray = field(default_factory=bytearray)
    came: dict[int, int] = field(default_factory=dict)  # length by offset
    touched: float = field(default_factory=time.monotonic)
    ending: bool = False


class Assemblies:
    """Of one peer. tell: what the peer is to hear, a piece's receipt or a verdict."""

    def __init__(self, peer: str, gate: Gate, finish: Finish, tell: Callable[[Receipt | Verdict], None]) -> None:
        self._peer, self._gate, self._finish, self._tell = peer, gate, finish, tell
        self._open: dict[int, Assembly] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, piece: Piece) -> None:
        """Take a piece in; returns when its chunk's gate has said something."""
        head, came = piece.head, time.monotonic_ns() // 1000
        assembly = self._open.get(head.ident)
        if assembly is None:
            if len(self._open) >= OPEN:
                self._sweep()
            if len(self._open) >= OPEN:
                self._tell(Verdict(head.ident, 429, f"{OPEN} chunks are open already"))
                return
            assembly = self._open[head.ident] = Assembly(asyncio.ensure_future(self._gate(self._peer, head)))
        try:
            held = await asyncio.shield(assembly.gate)
        except (Refused, IslesError) as error:
            self._end(head, assembly, error.status if isinstance(error, Refused) else 507, str(error))
            return
        if held:
            self._end(head, assembly, TAKEN)
        elif not assembly.ending:
            self._add(assembly, piece, came)

    def _add(self, assembly: Assembly, piece: Piece, came: int) -> None:
        head = piece.head
        if not assembly.body:
            assembly.body = bytearray(head.size)
        if piece.offset + len(piece.data) > len(assembly.body):
            self._end(head, assembly, 413, "a piece beyond its chunk")
            return
        self._tell((head.ident, piece.offset, came - piece.stamp))
        assembly.touched = time.monotonic()
        if piece.offset not in assembly.came:
            assembly.body[piece.offset : piece.offset + len(piece.data)] = piece.data
            assembly.came[piece.offset] = len(piece.data)
        if sum(assembly.came.values()) >= len(assembly.body):
            assembly.ending = True
            task = asyncio.create_task(self._whole(head, assembly))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _whole(self, head: Head, assembly: Assembly) -> None:
        try:
            body = await asyncio.to_thread(self._opened, head, assembly.body)
            await self._finish(self._peer, head, body)
        except Refused as refused:
            self._end(head, assembly, refused.status, str(refused))
        except CodecError as error:
            self._end(head, assembly, 400, str(error))
        except IslesError as error:
            self._end(head, assembly, 507, str(error))
        else:
            self._end(head, assembly, TAKEN)

    @staticmethod
    def _opened(head: Head, travelled: bytearray) -> bytes:
        body = bytes(travelled) if head.size == head.whole else unpack(bytes(travelled), head.whole)
        if chunk_digest(body) != head.digest:
            raise CodecError(f"chunk {head.chunk} arrived damaged: it does not match its hash")
        return body

    def _end(self, head: Head, assembly: Assembly, status: int, text: str = "") -> None:
        if self._open.get(head.ident) is assembly:
            del self._open[head.ident]
            self._tell(Verdict(head.ident, status, text))

    def _sweep(self) -> None:
        oldest = time.monotonic() - STALE
        for ident in [i for i, a in self._open.items() if a.touched < oldest and not a.ending]:
            self._open.pop(ident).gate.cancel()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for assembly in self._open.values():
            assembly.gate.cancel()
        self._open.clear()
