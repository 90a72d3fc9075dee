"""How fast, and how much: the cap that a host can set, the pace that keeps a line full and its buffers empty, and the count of every byte by purpose."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

Purpose = Literal["contributions", "averages", "results", "state"]
SLICE = 1 << 18  # bytes handed to a connection at once: small enough to share it, large enough to keep it busy
PIECE_SECONDS, LEAST_PIECE, PIECE, MOST_PIECE = (
    0.005,
    1 << 14,
    1 << 16,
    1 << 18,
)  # of the line's time, bytes, bytes while it is unknown, bytes


class RateCap:
    """A token bucket in front of everything that is sent. rate: what the host allows, bytes/s, None for no cap; pace: what the line was found to
    carry, bytes/s, None while it is unknown. The lower one holds."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.pace: float | None = None
        self.turn = asyncio.Lock()  # who would send next takes turns, over all connections, so that all peers get their share
        self._bound = False
        self._free = 0.0  # time at which the line is free again

    @property
    def now(self) -> float | None:
        """The rate that holds, bytes/s."""
        return min((rate for rate in (self.rate, self.pace) if rate is not None), default=None)

    def piece(self) -> int:
        """Bytes that go at once: some milliseconds of the line, so that nobody waits long for a turn."""
        rate = self.now
        return PIECE if rate is None else int(min(MOST_PIECE, max(LEAST_PIECE, rate * PIECE_SECONDS)))

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may go."""
        rate = self.now
        if rate is None:
            return
        now = time.monotonic()
        begin = max(self._free, now - self.piece() / rate)  # a short burst may make up for a late wake-up
        self._free = begin + count / rate
        if begin > now:
            self._bound = True
            await asyncio.sleep(begin - now)

    def was_bound(self) -> bool:
        """Whether somebody had to wait since this was last asked."""
        bound, self._bound = self._bound, False
        return bound


class Counters:
    """Bytes of bodies sent and received, by purpose."""

    def __init__(self) -> None:
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {"up": dict(self.up), "down": dict(self.down)}


async def send_slices(body: bytes | memoryview, write: Callable[[bytes | memoryview], Awaitable[None]], cap: RateCap) -> None:
    """Hand a body over slice by slice, no faster than the cap."""
    view = memoryview(body)
    for first in range(0, len(view), SLICE):
        part = view[first : first + SLICE]
        await cap.take(len(part))
        await write(part)
