"""What one peer is to be sent, in which order, and again when need be. Decides only: it neither sends nor waits.

Chunks are cut into pieces, and whichever lane is free takes the next one, so that no lane's slowness holds up what another could carry.
Contributions go before averages: nobody can average without them. A piece whose lane is lost goes again first; and when nothing else
is left to send, one whose receipt is overdue goes again over another lane, so that a round does not end with waiting for the slowest.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from isles.exchange.frames import TAKEN, Head, Kind, Piece, Receipt, Receipts, Verdict, renamed

OVERDUE, SLACK = 1.5, 0.05  # a receipt is overdue after so many times the usual time, and seconds more
REPEATS = 2  # of a piece whose receipt is overdue
PAUSE, LONGEST = 0.05, 1.0  # seconds before a chunk that was not taken goes again: the first time, and at most
RECEIPTS = 500  # in a frame
MINUTE, RECENT = 60.0, 0.25  # seconds


@dataclass(eq=False)
class Posted:
    """A chunk on its way. at: bytes of it that have been cut into pieces; heard: whether the peer has taken a piece since the chunk went again."""

    head: Head
    body: bytes | memoryview
    at: int = 0
    tries: int = 0
    heard: bool = False
    began: float | None = None
    not_before: float = 0.0

    @property
    def held(self) -> bool:
        """After a refusal one piece asks whether the whole is welcome now."""
        return self.tries > 0 and not self.heard and self.at > 0


@dataclass(eq=False)
class Sent:
    """A piece without a receipt yet."""

    posted: Posted
    offset: int
    length: int
    lane: int
    at: float
    repeats: int = 0


@dataclass
class Ended:
    """A sending of a chunk that is over, one way or the other: its head, and the seconds that it took."""

    head: Head
    seconds: float


class Way:
    """For how long packets wait on their way to the peer, whatever waits on the way back: the time it takes by two clocks, over the shortest seen in
    the last minute or two."""

    def __init__(self) -> None:
        self._shortest = [float("inf"), float("inf")]  # of this minute and the one before
        self._minute = self._at = float("-inf")
        self._waiting = 0.0

    def passed(self, delay: float, now: float) -> None:
        """A piece took so many seconds, and any amount that is always the same."""
        if now - self._minute > MINUTE:
            self._minute, self._shortest = now, [delay, self._shortest[0]]
        self._shortest[0] = min(self._shortest[0], delay)
        self._waiting += (delay - min(self._shortest) - self._waiting) / 8
        self._at = now

    def waiting(self, now: float) -> float | None:
        """Seconds; None while nothing goes there."""
        return self._waiting if now - self._at < RECENT else None


@dataclass
class Outbox:
    """clock: seconds. latency: between a piece's being handed to a lane and its receipt, in seconds; 0 while unknown."""

    clock: Callable[[], float] = time.monotonic
    latency: float = 0.0
    way: Way = field(default_factory=Way)
    _queues: tuple[deque[Posted], deque[Posted]] = field(default_factory=lambda: (deque(), deque()))
    _again: deque[Sent] = field(default_factory=deque)
    _sent: dict[tuple[int, int], Sent] = field(default_factory=dict)  # by ident and offset, in the order of sending
    _posted: dict[int, Posted] = field(default_factory=dict)  # by ident
    _receipts: list[Receipt] = field(default_factory=list)
    _verdicts: deque[Verdict] = field(default_factory=deque)
    _next: int = field(default_factory=lambda: random.getrandbits(62))  # no successor of this process may use its idents

    # --- in

    def post(self, head: Head, body: bytes | memoryview) -> None:
        """A chunk is to be sent. head.ident is made up here."""
        self._enqueue(Posted(head, body))

    def _enqueue(self, posted: Posted) -> None:
        self._next += 1
        posted.head, posted.at, posted.heard = renamed(posted.head, self._next), 0, False
        self._posted[self._next] = posted
        self._queues[posted.head.kind != Kind.CONTRIBUTION].append(posted)

    def drop(self, over: Callable[[Head], bool]) -> None:
        """Forget chunks that nobody needs any more."""
        for ident in [ident for ident, posted in self._posted.items() if over(posted.head)]:
            self._forget(ident)

    def _forget(self, ident: int) -> Posted | None:
        posted = self._posted.pop(ident, None)
        if posted is not None:
            for queue in self._queues:
                if posted in queue:
                    queue.remove(posted)
            for key in [key for key in self._sent if key[0] == ident]:
                del self._sent[key]
            self._again = deque(sent for sent in self._again if sent.posted is not posted)
        return posted

    def has(self, key: tuple[Kind, int, int, int, int]) -> bool:
        """Whether the chunk of this kind, fragment, round, attempt and number is still on its way."""
        return any((h.kind, h.fragment, h.number, h.attempt, h.chunk) == key for h in (p.head for p in self._posted.values()))

    @property
    def unsent(self) -> int:
        """Bytes that no lane has taken yet."""
        return sum(len(posted.body) - posted.at for queue in self._queues for posted in queue)

    @property
    def waits(self) -> bool:
        """Whether something is under way, or to be sent later."""
        return bool(self._posted)

    # --- what the peer says, and is told

    def receipt(self, ident: int, offset: int, delay: int) -> None:
        """A piece has come; delay: in microseconds, by two clocks that may differ by any amount."""
        sent = self._sent.pop((ident, offset), None)
        if sent is None:
            return
        now = self.clock()
        sent.posted.heard = True
        if not sent.repeats:
            seconds = now - sent.at
            self.latency += (seconds - self.latency) / 8 if self.latency else seconds
        self.way.passed(delay / 1e6, now)

    def verdict(self, verdict: Verdict) -> Ended | None:
        """A chunk was taken in, or was not and goes again after a pause."""
        posted = self._forget(verdict.ident)
        if posted is None:
            return None
        now = self.clock()
        ended = Ended(posted.head, now - (posted.began or now))
        if verdict.status == TAKEN:
            return ended
        posted.not_before = now + min(LONGEST, PAUSE * 2.0**posted.tries)
        posted.tries += 1
        self._enqueue(posted)
        return ended

    def tell(self, what: Receipt | Verdict) -> None:
        """The peer is to hear of this: a piece that has come, or what became of a chunk."""
        if isinstance(what, Verdict):
            self._verdicts.append(what)
        else:
            self._receipts.append(what)

    # --- out

    def answer(self) -> bytes | None:
        """The next frame that tells the peer what became of its own pieces."""
        if self._receipts:
            some, self._receipts = self._receipts[:RECEIPTS], self._receipts[RECEIPTS:]
            return Receipts(some).frame()
        return self._verdicts.popleft().frame() if self._verdicts else None

    def take(self, lane: int, most: int) -> Piece | None:
        """The next piece, for a lane; at most so many bytes."""
        now = self.clock()
        if self._again:
            return self._hand(self._again.popleft(), lane, now)
        for queue in self._queues:
            for posted in queue:
                if posted.held or posted.not_before > now:
                    continue
                sent = Sent(posted, posted.at, min(most, len(posted.body) - posted.at), lane, now)
                posted.at += sent.length
                posted.began = posted.began or now
                if posted.at == len(posted.body):
                    queue.remove(posted)
                return self._hand(sent, lane, now)
        return self._overdue(lane, now)

    def _overdue(self, lane: int, now: float) -> Piece | None:
        if not self.latency:
            return None
        for sent in self._sent.values():
            if now - sent.at < OVERDUE * self.latency + SLACK:
                return None
            if sent.lane != lane and sent.repeats < REPEATS and not sent.posted.held:
                sent.repeats += 1
                return self._hand(sent, lane, now)
        return None

    def _hand(self, sent: Sent, lane: int, now: float) -> Piece:
        sent.lane, sent.at = lane, now
        key = (sent.posted.head.ident, sent.offset)
        self._sent.pop(key, None)
        self._sent[key] = sent
        data = memoryview(sent.posted.body)[sent.offset : sent.offset + sent.length]
        return Piece(sent.posted.head, sent.offset, data)

    def lost(self, lane: int) -> None:
        """A lane is gone: what it carried goes again."""
        gone = [sent for sent in self._sent.values() if sent.lane == lane]
        for sent in gone:
            del self._sent[sent.posted.head.ident, sent.offset]
        self._again.extend(gone)
