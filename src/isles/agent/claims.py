"""Who trains which samples, as one record that all clusters share.

The record is a `data.Ledger` and two counters; each change is a pure function of it, written by compare-and-set, so it does not
matter who makes it. A claim is made for all clusters at once, in the order of their names, by whoever runs short first: clusters
of equal speed then train the same samples whichever of them is quicker by a hair, and a run can be repeated bit for bit.
Samples count as trained when the round that they are in is committed, once, whoever sees it first; what a cluster held that died
is claimed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isles.data import Ledger
from isles.errors import MALFORMED, DataError
from isles.protocol import RoundRecord

AHEAD = 4  # claims that a cluster may hold that no committed round has counted: a slow one does not pile them up

Range = tuple[int, int]


@dataclass
class Claims:
    """ledger: a claim's label is its number among its cluster's claims, from 1. given: claims that each cluster was given so far.
    counted: the last round of fragment 0 whose samples are in the ledger."""

    ledger: Ledger
    given: dict[str, int] = field(default_factory=dict)
    counted: int = 0

    @classmethod
    def empty(cls, size: int) -> Claims:
        """For a dataset of `size` sequences."""
        return cls(Ledger(size))

    def pack(self) -> bytes:
        return json.dumps({"ledger": self.ledger.to_dict(), "given": self.given, "counted": self.counted}).encode()

    @classmethod
    def parse(cls, data: bytes) -> Claims:
        """Raises DataError when the record is damaged."""
        try:
            record: Any = json.loads(data)
            given, counted = record["given"], record["counted"]
            fits = all(isinstance(n, int) and n >= 0 for n in [*given.values(), counted])
            ledger = Ledger.from_dict(record["ledger"])
        except MALFORMED as error:
            raise DataError("the run's record of claimed samples is damaged") from error
        if not fits:
            raise DataError("the run's record of claimed samples is damaged")
        return cls(ledger, dict(given), counted)

    def ranges(self, cluster: str, number: int) -> tuple[Range, ...]:
        """What is in a cluster's claim of that number, in stream order."""
        return tuple((c.start, c.stop) for c in self.ledger.held(cluster) if c.round == number)

    def give(self, cluster: str, number: int, counts: Mapping[str, int]) -> bool:
        """Make claim `number` of a cluster, and with it that of everybody who has not been given so many. counts: positions in a claim of
        each cluster that trains now. Returns whether anything changed."""
        if self.given.get(cluster, 0) >= number:
            return False
        for name in sorted({*counts, cluster}):
            mine, held = self.given.get(name, 0), {c.round for c in self.ledger.held(name)}
            if name == cluster or (mine < number and len(held) <= AHEAD):
                self.given[name] = number if name == cluster else mine + 1  # a store may have lost more than one claim
                self.ledger.claim(name, self.given[name], counts[name])
        return True

    def count(self, record: RoundRecord) -> bool:
        """A round of fragment 0 was committed: its samples are trained. Returns whether that was news.

        A range that its cluster does not hold any more (it was taken for dead, and its samples were given away) is left as it is."""
        changed = False
        rounds = ((record.number - 1, record.before), (record.number, record.participants))
        for number, participants in rounds if record.phase == "committed" else rounds[:1]:
            if number <= self.counted:
                continue
            self.counted = number
            changed = True
            for participant in participants:
                for start, stop in participant.ranges:
                    self._use(participant.cluster, start, stop)
        return changed

    def _use(self, cluster: str, start: int, stop: int) -> None:
        for claim in self.ledger.held(cluster):
            low, high = max(start, claim.start), min(stop, claim.stop)
            if low < high:
                self.ledger.use(cluster, low, high)

    def free(self, cluster: str, keep: Iterable[Range] = (), upto: int | None = None) -> bool:
        """A cluster is gone, or begins anew: what it held is claimed again, but for what it has trained and is yet to be counted (keep), and
        claims after number `upto`, which nobody has begun. Returns whether that changed anything."""
        kept = list(keep)
        changed = False
        for claim in self.ledger.held(cluster):
            if upto is not None and claim.round > upto:
                continue
            at = claim.start
            for start, stop in [*sorted(kept), (claim.stop, claim.stop)]:
                if at < min(start, claim.stop):
                    self.ledger.release(cluster, at, min(start, claim.stop))
                    changed = True
                at = max(at, min(stop, claim.stop))
        return changed
