"""Virtual time, a simulated store and simulated lines: everything that can go wrong between clusters, from one seed.

The store is linearizable, as a JetStream stream is: an operation takes effect at one moment between its request and its reply. Either
may be lost, so a writer may never learn what became of its write. Watchers hear of every change after a delay of their own,
out of order, twice, or, when they are cut off, not before they are connected again and have read everything anew.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

CALL_TIMEOUT = 2.0  # seconds until a writer gives an unanswered operation up


class World:
    """The clock, the queue of what is to happen, and the one source of randomness."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.now = seed, random.Random(seed), 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.trace: list[str] | None = None

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, action))

    def step(self) -> bool:
        """Do the next thing. False when there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True

    def log(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f}  {text}")


@dataclass
class Lines:
    """Which ways are open. Names of clusters, and 'store'. loss: chance that a message is lost; slow: mean delay in seconds."""

    world: World
    cut: set[frozenset[str]] = field(default_factory=set)
    loss: float = 0.0
    slow: float = 0.02

    def open(self, a: str, b: str) -> bool:
        return a == b or frozenset((a, b)) not in self.cut

    def delay(self) -> float:
        return self.world.random.expovariate(1 / self.slow)

    def send(self, a: str, b: str, action: Callable[[], None]) -> None:
        """Do `action` at b after a's message has arrived, if it arrives."""
        random = self.world.random
        if not self.open(a, b) or random.random() < self.loss:
            return
        self.world.after(self.delay(), lambda: action() if self.open(a, b) else None)
        if random.random() < self.loss:
            self.world.after(self.delay() * 3, lambda: action() if self.open(a, b) else None)  # and once more, later


class Store:
    """The run's key-value record under simulated lines."""

    def __init__(self, world: World, lines: Lines) -> None:
        self.world, self.lines, self.up = world, lines, True
        self.epoch = 1  # a connection does not outlive the server's death, nor does what is under way on it
        self.values: dict[str, tuple[bytes, int]] = {}
        self.revision = 0
        self._log: list[tuple[str, tuple[bytes, int] | None]] = []  # keys written, with what had stood there
        self.watchers: dict[str, Callable[[str, bytes, int], None]] = {}
        self.on_write: Callable[[str, bytes], None] = lambda _key, _value: None

    def write(self, who: str, key: str, value: bytes, expected: int | None, reply: Callable[[bool | None], None]) -> None:
        """Put (expected None), create (0) or compare-and-set. reply: True, False (somebody was first), or None: not known."""
        answered: list[bool] = []
        epoch = self.epoch

        def answer(outcome: bool | None) -> None:
            if not answered:
                answered.append(True)
                reply(outcome)

        def arrive() -> None:
            if not self.up or epoch != self.epoch:
                return
            standing = self.values.get(key, (b"", 0))[1]
            won = expected is None or expected == standing
            if won:
                self._set(key, value)
            self.lines.send("store", who, lambda: answer(won))

        self.lines.send(who, "store", arrive)
        self.world.after(CALL_TIMEOUT, lambda: answer(None))

    def _set(self, key: str, value: bytes) -> None:
        self.revision += 1
        revision = self.revision
        self._log.append((key, self.values.get(key)))
        self.values[key] = (value, revision)
        self.on_write(key, value)
        for who in list(self.watchers):
            self._notify(who, key, value, revision)

    def stop(self) -> None:
        self.up = False

    def restart(self, lost: int = 0) -> None:
        """lost: so many of the last writes are gone, as after a power cut under a server that does not write through to its disk."""
        if self.up:
            return
        self.up, self.epoch = True, self.epoch + 1
        for _ in range(min(lost, len(self._log))):
            key, before = self._log.pop()
            self.revision -= 1
            if before is None:
                del self.values[key]
            else:
                self.values[key] = before

    def _notify(self, who: str, key: str, value: bytes, revision: int) -> None:
        epoch = self.epoch

        def arrive() -> None:
            watcher = self.watchers.get(who)
            if watcher is not None and self.up and epoch == self.epoch:
                watcher(key, value, revision)

        self.lines.send("store", who, arrive)

    def connected(self, who: str) -> bool:
        return self.up and self.lines.open(who, "store")

    def read_all(self, who: str) -> None:
        """What a watcher does when it is connected again, or unsure: hear of everything that stands."""
        for key, (value, revision) in self.values.items():
            self._notify(who, key, value, revision)
