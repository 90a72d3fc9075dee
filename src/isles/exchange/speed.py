"""How fast this cluster's line is, as its own traffic shows: the kernel counts what was delivered and what came, per connection.

Parts are sized by it (`protocol.parts`), and the pace is set by it (`pace`). A line shows its speed only while it is kept busy, so the best window of a burst of traffic counts, and
of bursts that are long enough; the median of the last few bursts is taken, and rounded, so that equal lines are told to be equal.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from isles.exchange.kernel import Connection, Seen, seen
from isles.exchange.pace import SHORT, Pace
from isles.exchange.rate import RateCap

WINDOW = 0.25  # seconds
LEAST = 3  # windows of a burst that says something, its first and last apart
MOST = 240  # windows of a burst; what goes on is another one
IDLE = 4  # windows without traffic that end a burst
BURSTS = 5  # whose median counts
MOVING = 1 << 12  # bytes since the last look on a connection whose round trip says something
QUIET = 1 << 14  # bytes in a window that are no traffic worth the name
FAST = 125e6  # bytes/s
STEPS = 4  # to a doubling, to which speeds are rounded

TICK = 0.05  # seconds between two looks while there is traffic


class Direction:
    """One way of the line. `speed` in bytes/s; 0 while nothing is known."""

    def __init__(self) -> None:
        self._bursts: deque[float] = deque(maxlen=BURSTS)
        self._windows: list[float] = []
        self._idle = 0

    def window(self, count: int, seconds: float) -> None:
        """So many bytes went through in the last so many seconds."""
        if count >= QUIET:
            self._windows.append(count / seconds)
            self._idle = 0
        else:
            self._idle += 1
        if self._idle == IDLE or len(self._windows) == MOST:
            if len(self._windows) >= LEAST + 2:
                self._bursts.append(max(self._windows[1:-1]))
            self._windows.clear()

    @property
    def speed(self) -> int:
        if not self._bursts:
            return 0
        return round(2 ** (round(math.log2(median(self._bursts)) * STEPS) / STEPS))


class LineSpeed:
    """Both ways of the line, from all connections of the exchange. It holds none of them open."""

    def __init__(self) -> None:
        self.up, self.down = Direction(), Direction()
        self.pace = Pace()
        self._trip = 0.0  # of those that were last sent to, seconds
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()

    def watch(self, connection: Connection) -> None:
        """Count a connection from now on."""
        self._connections.add(connection)

    @property
    def fast(self) -> bool:
        """Whether the line carries bytes as fast as they could be made fewer, or leads to the next rack."""
        return self.up.speed >= FAST or 0 < self._trip < SHORT

    async def run(self, cap: RateCap, waiting: Callable[[], float | None]) -> None:
        """Look at the counters, for ever, and set the pace. waiting: for how long packets wait on their way to the others, in seconds."""
        clock = asyncio.get_running_loop().time
        began = window = clock()
        out = came = sent = received = 0
        while True:
            await asyncio.sleep(TICK if out + came >= MOVING else WINDOW)
            out, came, both_ways, trip = self._moved()
            now = clock()
            self._trip = trip or self._trip
            there = waiting()
            self.pace.moved(
                out, now - began, None if there is None or both_ways is None else min(both_ways, there), trip, cap.was_bound()
            )
            cap.pace = self.pace.rate
            sent, received, began = sent + out, received + came, now
            if now - window >= WINDOW * 0.99:
                self.up.window(sent, now - window)
                self.down.window(received, now - window)
                sent, received, window = 0, 0, now

    def _moved(self) -> tuple[int, int, float | None, float]:
        """Bytes delivered and received since the last call; for how long packets wait there and back, and the round trip without, in seconds."""
        sent = received = 0
        waits, trips = [], []
        for connection in list(self._connections):
            now, before = seen(connection), self._before.get(connection)
            if now is None:
                continue
            out = now.delivered - (before.delivered if before else 0)
            sent, received = sent + out, received + now.received - (before.received if before else 0)
            self._before[connection] = now
            if out > MOVING:
                waits.append(now.trip - now.shortest)
                trips.append(now.shortest)
        return sent, received, median(waits) if waits else None, median(trips) if trips else 0.0
