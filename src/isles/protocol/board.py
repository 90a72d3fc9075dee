"""What one cluster sees of the store: the newest record under every key, and for how long it has stood there.

Time is only ever measured here, locally, as how long a record has stood; no clock is compared between machines. A record that arrives
twice, or after a newer one, changes nothing. While the store cannot be reached no record can be refreshed, so that time does not
count, and once it is back every member gets a whole lease before it is judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from isles.errors import RecordError
from isles.protocol.records import DoneRecord, MemberRecord, ReadyRecord, RoundRecord, parse

Value = TypeVar("Value")

LEASE = 6.0  # seconds a member's record may stand unrefreshed before the member counts as gone
BEAT = 1.0  # seconds between refreshes
SUSPICION = 2.5  # seconds without a refresh after which one participant's word is enough to go on without the member


@dataclass(slots=True)
class Seen(Generic[Value]):
    """A record as it stands. since: local time at which this value was first seen."""

    record: Value
    revision: int
    since: float


class Board:
    """The records of a run. `now` is any clock that only moves forward, in seconds."""

    def __init__(self) -> None:
        self.members: dict[str, Seen[MemberRecord]] = {}
        self.rounds: dict[int, Seen[RoundRecord]] = {}
        self.ready: defaultdict[int, dict[str, Seen[ReadyRecord]]] = defaultdict(dict)
        self.done: defaultdict[int, dict[str, Seen[DoneRecord]]] = defaultdict(dict)
        self._lost_at: float | None = None

    def put(self, key: str, value: bytes, revision: int, now: float) -> bool:
        """Take what the store holds under `key`. Returns whether that is news. Keys of other kinds are ignored.

        Raises RecordError when the value is no record of its kind; what stood there stays."""
        kind, *rest = key.split(".")
        if rest and kind in ("rounds", "ready", "done") and not (rest[0].isascii() and rest[0].isdigit() and len(rest[0]) < 6):
            return False  # no fragment's
        if kind == "members" and len(rest) == 1:
            member = parse(MemberRecord, value)
            if member.cluster != rest[0]:
                raise RecordError(f"{key} speaks for another cluster, {member.cluster}: refuse its writer")
            return _take(self.members, rest[0], member, revision, now)
        if kind == "rounds" and len(rest) == 1:
            record = parse(RoundRecord, value)
            if record.fragment != int(rest[0]):
                raise RecordError(f"{key} speaks of another fragment, {record.fragment}: refuse its writer")
            return _take(self.rounds, int(rest[0]), record, revision, now)
        if kind == "ready" and len(rest) == 2:
            return _take(self.ready[int(rest[0])], rest[1], parse(ReadyRecord, value), revision, now)
        if kind == "done" and len(rest) == 2:
            return _take(self.done[int(rest[0])], rest[1], parse(DoneRecord, value), revision, now)
        return False

    def disconnected(self, now: float) -> None:
        """The store cannot be reached any more."""
        if self._lost_at is None:
            self._lost_at = now

    def connected(self, now: float) -> None:
        """The store is back: the time without it did not count, and members have had no chance to refresh.

        What it says now holds, whatever it had said before: a store may have lost its last writes, and count its revisions anew from
        there. The caller reads everything again."""
        if self._lost_at is None:
            return
        away, self._lost_at = now - self._lost_at, None
        for seen in self._all():
            seen.revision = 0
        for member in self.members.values():
            member.since = now
        for round_ in self.rounds.values():
            round_.since += away
        for ready in (seen for table in self.ready.values() for seen in table.values()):
            ready.since += away
        for done in (seen for table in self.done.values() for seen in table.values()):
            done.since += away

    def _all(self) -> Iterator[Seen[Any]]:
        yield from self.members.values()
        yield from self.rounds.values()
        for ready in self.ready.values():
            yield from ready.values()
        for done in self.done.values():
            yield from done.values()

    def view(self, fragment: int, now: float) -> View:
        """One fragment's records as they stand now."""
        return View(self, fragment, now if self._lost_at is None else self._lost_at)


class View:
    """One fragment's records at one moment, as the transitions read them."""

    __slots__ = ("done", "fragment", "members", "now", "ready", "round")

    def __init__(self, board: Board, fragment: int, now: float) -> None:
        self.fragment, self.now = fragment, now
        self.members = board.members
        self.round = board.rounds.get(fragment)
        self.ready = board.ready[fragment]
        self.done = board.done[fragment]

    def stood(self, seen: Seen[Value]) -> float:
        """Seconds that a record has stood."""
        return self.now - seen.since

    def alive(self, cluster: str, incarnation: str | None = None) -> bool:
        """Whether a member refreshes its record, and is still the process that it was."""
        seen = self.members.get(cluster)
        if seen is None or self.now - seen.since > LEASE:
            return False
        return incarnation is None or seen.record.incarnation == incarnation

    def suspect(self, cluster: str) -> bool:
        """Whether a member has missed refreshes."""
        seen = self.members.get(cluster)
        return seen is None or self.now - seen.since > SUSPICION


def _take(
    table: dict[str, Seen[Value]] | dict[int, Seen[Value]], key: object, record: Value, revision: int, now: float
) -> bool:
    seen = table.get(key)  # type: ignore[call-overload]
    if seen is not None and seen.revision >= revision:
        return False
    if seen is not None and seen.revision == 0 and seen.record == record:
        seen.revision = revision  # read again after the store was away: it has stood all the while
        return True
    table[key] = Seen(record, revision, now)  # type: ignore[index]
    return True
