"""The pace at which a line is kept full while its buffers stay empty.

Both directions of a line carry data and each other's acknowledgements. Where data waits in a buffer, the acknowledgements of the other direction
wait behind it, and no congestion control at either end can keep its line full then (docs/performance.md). So everything that is sent leaves
at one pace, and that follows how long packets are seen to wait, as in LEDBAT (RFC 6817), but for all connections together: it begins at what
the line carried when it was first seen to be full, and rises slowly while nothing waits and falls while something does.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SPAN = 0.2  # seconds of traffic that are looked at together
QUIET = 50_000  # bytes/s that are no traffic worth the name
IDLE = 0.5  # seconds without traffic that end a burst
BURSTS = 5
SHORT = 0.002  # seconds: no line with a shorter round trip is paced; there is nothing to gain
HIGH, LOW = 0.03, 0.015  # seconds that packets may wait before the pace falls, and below which it rises
FALL, RISE = 0.3, 0.15  # of the pace, in a second: falling by as much again for each HIGH that packets wait, rising ever faster
FASTER, FASTEST = 0.25, 1.5  # seconds in which the rise doubles while nothing waits, and its end
FIRST = 1.0  # seconds of traffic after which the line is known: connections begin slowly
LEAST = 0.95  # of the most that the line carried in a burst: the pace never falls below
MORE = 1.05  # times the pace that the line may seem to carry: more is what had waited before
AHEAD, SEARCH = (
    1.03,
    1.1,
)  # times the most that was carried, above which the pace does not rise, as what waits is seen late; and while nothing waits
EMPTY = 0.005  # seconds of waiting that are none


class Pace:
    """Told what was sent, says how fast to send. rate: bytes/s; None while nothing is known, or nothing to be gained."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._bursts: deque[float] = deque(maxlen=BURSTS)  # the most that each carried
        self._best = self._idle = self._busy = 0.0
        self._rise = RISE

    def moved(self, count: int, seconds: float, waiting: float | None, trip: float, bound: bool) -> None:
        """In the last so many seconds so many bytes were acknowledged; packets waited for `waiting` seconds in buffers (None: unknown), on a way whose round trip
        takes `trip` seconds without. bound: whether the pace held anything back."""
        if count < QUIET * seconds:
            self._recent.clear()
            self._idle += seconds
            if self._best and self._idle >= IDLE:
                self._bursts.append(self._best)
                self._best = 0.0
            return
        self._idle, self._busy = 0.0, self._busy + seconds
        self._recent.append((seconds, count))
        while sum(s for s, _ in self._recent) > 1.5 * SPAN:
            self._recent.popleft()
        span = sum(s for s, _ in self._recent)
        if span >= SPAN:
            carried = sum(c for _, c in self._recent) / span
            self._best = max(self._best, carried if self.rate is None else min(carried, MORE * self.rate))
        if waiting is None:
            return
        if trip < SHORT:
            self.rate = None
        elif waiting > HIGH:
            self._rise = RISE
            if self._busy >= FIRST:
                self._fall(seconds * min(4.0, waiting / HIGH))
        elif waiting > LOW:
            self._rise = RISE
        elif bound and self.rate is not None:
            most = (SEARCH if waiting < EMPTY else AHEAD) * self._known
            self.rate = max(self.rate, min(self.rate * (1 + self._rise * seconds), most))
            self._rise = min(FASTEST, self._rise * 2 ** (seconds / FASTER))

    def _fall(self, seconds: float) -> None:
        known = self._known
        if known:
            self.rate = min(known, max(LEAST * known, (self.rate or known) * (1 - FALL * seconds)))

    @property
    def _known(self) -> float:
        """The most that was carried in this burst, or in the last ones as a rule; bytes/s."""
        return max(self._best, median(self._bursts or [0.0]))
