"""How fast this cluster's line is, as its own traffic shows: the kernel counts what was acknowledged and what came, per connection.

Parts are sized by it (`protocol.parts`). A line shows its speed only while it is kept busy, so the best window of a burst of traffic counts, and
of bursts that are long enough; the median of the last few bursts is taken, and rounded, so that equal lines are told to be equal.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import weakref
from collections import deque
from statistics import median
from typing import Any

WINDOW = 0.25  # seconds
LEAST = 3  # windows of a burst that says something, its first and last apart
MOST = 240  # windows of a burst; what goes on is another one
IDLE = 4  # windows without traffic that end a burst
BURSTS = 5  # whose median counts
QUIET = 1 << 14  # bytes in a window that are no traffic worth the name
STEPS = 4  # to a doubling, to which speeds are rounded

_COUNTERS = struct.Struct("120xQQ")  # struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received


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
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def watch(self, connection: socket.socket | asyncio.BaseTransport) -> None:
        """Count a connection from now on."""
        self._connections.add(connection)

    async def run(self) -> None:
        """Look at the counters, for ever."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await asyncio.sleep(WINDOW)
            sent, received = self._moved()
            now = clock()
            self.up.window(sent, now - began)
            self.down.window(received, now - began)
            began = now

    def _moved(self) -> tuple[int, int]:
        """Bytes acknowledged and received since the last call."""
        sent = received = 0
        for connection in list(self._connections):
            counters = _counters(connection)
            if counters is None:
                continue
            before = self._before.get(connection, (0, 0))
            sent, received = sent + counters[0] - before[0], received + counters[1] - before[1]
            self._before[connection] = counters
        return sent, received


def _counters(connection: Any) -> tuple[int, int] | None:
    """Bytes acknowledged and received on a connection so far; None where the kernel does not say."""
    held = connection if isinstance(connection, socket.socket) else connection.get_extra_info("socket")
    try:
        acknowledged, received = _COUNTERS.unpack(held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size))
    except (OSError, AttributeError, struct.error):
        return None
    return acknowledged, received
