"""How fast, and how much: the cap that a host can set, and the count of every byte by purpose."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Literal

Purpose = Literal["contributions", "averages", "results", "state"]
UNDER_WAY = (
    6 << 20
)  # bytes asked for at once when an exchange begins, in each direction: what a line of 300 Mbit/s carries in 150 ms
SLICE = 1 << 18  # bytes handed to a connection at once: small enough to share it, large enough to keep it busy


class RateCap:
    """A token bucket in front of everything that is sent. rate: bytes/s, None for no cap."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free = 0.0  # time at which the line is free again
        self._lock = asyncio.Lock()

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may go."""
        if self.rate is None:
            return
        async with self._lock:
            now = time.monotonic()
            begin = max(self._free, now - SLICE / self.rate)  # a short burst may make up for a late wake-up
            self._free = begin + count / self.rate
        if begin > now:
            await asyncio.sleep(begin - now)


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


class Width:
    """How many requests to keep under way with one peer, found while running.

    It begins with what may fill a line, by the size of a request, and grows by one while that brings more bytes a second, and stops growing when it does not. One TCP stream under default congestion
    control may fall to a twentieth of a long line, eight may fill it; on a short line two are enough."""

    FIRST, EARLY, MOST, WINDOW, GAIN = 2, 8, 16, 0.5, 1.08  # requests, requests, requests, seconds at least, growth that counts

    def __init__(self) -> None:
        self.now = self.FIRST
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._bytes, self._since = 0, time.monotonic()
        self._best = 0.0
        self._request = 0  # bytes of those that `now` was found for

    async def __aenter__(self) -> None:
        while self._busy >= self.now:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # the turn goes to somebody else
                raise
        self._busy += 1

    async def __aexit__(self, *_: object) -> None:
        self._busy -= 1  # nothing is awaited here, so that being cancelled loses no place
        self._next()

    def _next(self) -> None:
        free = self.now - self._busy
        while free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1

    def begin(self, request: int, peers: int) -> None:
        """Requests of so many bytes are about to go to so many peers at once: enough of them that the line need not wait for answers, or as many
        as was found to be good for requests of that size."""
        enough = max(self.FIRST, min(self.EARLY, -(-UNDER_WAY // (request * peers))))
        self.now = max(self.now, enough) if request == self._request else enough
        self._request = request
        self._bytes, self._since = 0, time.monotonic()

    def moved(self, count: int) -> None:
        """So many bytes have gone through."""
        self._bytes += count
        seconds = time.monotonic() - self._since
        if seconds < self.WINDOW:
            return
        speed = self._bytes / seconds
        if speed > self._best * self.GAIN and self.now < self.MOST:
            self.now += 1
            self._next()
        self._best = max(self._best, speed)
        self._bytes, self._since = 0, time.monotonic()
