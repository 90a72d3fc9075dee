"""Who trains which part of the data order: a ledger of claimed ranges.

The order of the data is one endless stream of positions (order.py). A cluster claims the next range before it trains on it,
reports what it has trained, and gives back what it has not when it leaves. What was given back is claimed again before
anything new. So, whatever joins, leaves or dies, each position is trained at most once, and once exactly when every claim is
used: every sample once per pass. (Static shards per cluster repeat rows as soon as clusters differ in speed or number.)

Below `next`, every position is in exactly one of three states: held by a cluster, free again, or trained. Held and free ranges are
stored, trained is the rest, so the record is as small as the claims that are out, however long the run. Who trained which is
kept as counts for the prefix that is wholly trained, and range by range above it, up to MAX_DETAIL ranges.

No clock, no I/O, nothing random: what `claim` returns is a function of the record and the arguments, so a store with
compare-and-set can hold `to_dict()` and any cluster can compute the next record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isles.data.order import sample_ids
from isles.errors import DataError

MAX_DETAIL = 1024  # trained ranges named one by one; a record stays under about 50 KB


@dataclass(frozen=True)
class Claim:
    """Stream positions [start, stop) that `cluster` is to train, claimed in `round`."""

    start: int
    stop: int
    cluster: str
    round: int

    def __len__(self) -> int:
        return self.stop - self.start


class Ledger:
    """The claims on the stream over a dataset of `size` sequences. Position p is sequence p % size's place in pass p // size.

    Names of clusters may be strings or integers; they are kept as strings. ValueError: a range that the cluster does not hold.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a ledger needs a dataset of at least one sequence, not {size}")
        self.size = size
        self.next = 0  # the first position nobody has claimed
        self._free: list[tuple[int, int]] = []  # sorted, disjoint, not touching
        self._held: dict[str, list[tuple[int, int, int]]] = {}  # start, stop, round; sorted by start
        self._trained: list[tuple[int, int, str]] = []  # sorted by start; the newest detail
        self._counts: dict[str, int] = {}  # trained positions whose detail was folded away

    def claim(self, cluster: str | int, round: int, count: int) -> tuple[Claim, ...]:
        """`count` positions for `cluster`: what was given back first, lowest positions first, then the next new ones."""
        if count < 1:
            raise ValueError(f"a claim is for at least one position, not {count}")
        name, claims = str(cluster), []
        while count and self._free:
            start, stop = self._free[0]
            taken = min(count, stop - start)
            claims.append(Claim(start, start + taken, name, round))
            self._free[:1] = [(start + taken, stop)] if start + taken < stop else []
            count -= taken
        if count:
            claims.append(Claim(self.next, self.next + count, name, round))
            self.next += count
        held = self._held.setdefault(name, [])
        for claim in claims:
            _insert_held(held, (claim.start, claim.stop, round))
        return tuple(claims)

    def use(self, cluster: str | int, start: int, stop: int) -> None:
        """`cluster` has trained [start, stop), which it holds."""
        self._take(str(cluster), start, stop)
        self._add_trained(start, stop, str(cluster))
        self._fold()

    def release(self, cluster: str | int, start: int, stop: int) -> None:
        """`cluster` gives [start, stop) back, which it holds and has not trained."""
        self._take(str(cluster), start, stop)
        self._free = _merged([*self._free, (start, stop)])

    def leave(self, cluster: str | int) -> tuple[Claim, ...]:
        """All that `cluster` still holds is free again (it left or died): what that was."""
        claims = self.held(cluster)
        self._held.pop(str(cluster), None)
        self._free = _merged([*self._free, *((c.start, c.stop) for c in claims)])
        return claims

    def held(self, cluster: str | int) -> tuple[Claim, ...]:
        """What `cluster` claimed and has neither trained nor given back."""
        return tuple(Claim(start, stop, str(cluster), round) for start, stop, round in self._held.get(str(cluster), ()))

    def trained(self) -> dict[str, int]:
        """Positions trained so far, by cluster."""
        counts = dict(self._counts)
        for start, stop, cluster in self._trained:
            counts[cluster] = counts.get(cluster, 0) + stop - start
        return counts

    def trained_ranges(self) -> tuple[tuple[int, int, str], ...]:
        """(start, stop, cluster) of the trained ranges that are still named one by one."""
        return tuple(self._trained)

    @property
    def complete(self) -> int:
        """Every position below this one is trained; `complete // size` passes are."""
        first = [ranges[0][0] for ranges in self._held.values() if ranges] + [start for start, _ in self._free[:1]]
        return min(first, default=self.next)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; equal ledgers give equal dictionaries."""
        return {
            "size": self.size,
            "next": self.next,
            "free": [list(r) for r in self._free],
            "held": {name: [list(r) for r in ranges] for name, ranges in sorted(self._held.items()) if ranges},
            "trained": [list(r) for r in self._trained],
            "counts": dict(sorted(self._counts.items())),
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Ledger:
        """The ledger of a `to_dict` record. DataError when the record is none or contradicts itself."""
        try:
            ledger = cls(int(record["size"]))
            ledger._load(record)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError("the record of claimed data ranges is damaged; go on from an earlier checkpoint") from None
        return ledger

    def load_dict(self, record: dict[str, Any]) -> None:
        """Become the ledger of a `to_dict` record. DataError when it is damaged or of a dataset of another size."""
        other = Ledger.from_dict(record)
        if other.size != self.size:
            raise DataError(
                f"the saved data position is of a dataset of {other.size} sequences, this one has {self.size}; use the dataset "
                "and sequence_length that the run began with"
            )
        self.__dict__.update(other.__dict__)

    def _load(self, record: dict[str, Any]) -> None:
        self.next = int(record["next"])
        self._free = [(int(start), int(stop)) for start, stop in record["free"]]
        self._held = {str(c): [(int(a), int(b), int(r)) for a, b, r in ranges] for c, ranges in record["held"].items()}
        self._trained = [(int(start), int(stop), str(c)) for start, stop, c in record["trained"]]
        self._counts = {str(c): int(n) for c, n in record["counts"].items()}
        out = [*self._free, *((a, b) for ranges in self._held.values() for a, b, _ in ranges)]
        spans = sorted([*out, *((a, b) for a, b, _ in self._trained)])
        edges = [0, *(edge for span in spans for edge in span), self.next]
        if edges != sorted(edges) or any(start == stop for start, stop in spans):
            raise ValueError("ranges overlap")
        if sum(self.trained().values()) + sum(stop - start for start, stop in out) != self.next:
            raise ValueError("positions are missing")

    def _take(self, name: str, start: int, stop: int) -> None:
        """Remove [start, stop) from what `name` holds."""
        ranges = self._held.get(name, [])
        rest: list[tuple[int, int, int]] = []
        found = 0
        for a, b, number in ranges:
            low, high = max(a, start), min(b, stop)
            if low >= high:
                rest.append((a, b, number))
                continue
            found += high - low
            rest += [(x, y, number) for x, y in ((a, low), (high, b)) if x < y]
        if start >= stop or found != stop - start:
            raise ValueError(f"cluster {name} does not hold all of [{start}, {stop}); it holds {[r[:2] for r in ranges]}")
        if rest:
            self._held[name] = rest
        else:
            del self._held[name]

    def _add_trained(self, start: int, stop: int, name: str) -> None:
        at = bisect_right(self._trained, (start,))
        if at < len(self._trained) and self._trained[at][0] == stop and self._trained[at][2] == name:
            stop = self._trained.pop(at)[1]
        if at and self._trained[at - 1][1] == start and self._trained[at - 1][2] == name:
            at -= 1
            start = self._trained.pop(at)[0]
        self._trained.insert(at, (start, stop, name))

    def _fold(self) -> None:
        """Turn into counts what lies in the wholly trained prefix, and the lowest ranges above MAX_DETAIL."""
        complete, kept = self.complete, 0
        while kept < len(self._trained) and (self._trained[kept][1] <= complete or len(self._trained) - kept > MAX_DETAIL):
            start, stop, name = self._trained[kept]
            self._counts[name] = self._counts.get(name, 0) + stop - start
            kept += 1
        del self._trained[:kept]


class Sampler:
    """From claims to samples: which sequences of a dataset of `size` a claim stands for, in the order of `seed`."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def ids(self, claims: Claim | Iterable[Claim]) -> NDArray[np.int64]:
        """int64 [positions claimed]: indices for `Dataset.batch`."""
        many = [claims] if isinstance(claims, Claim) else list(claims)
        positions = [np.arange(claim.start, claim.stop, dtype=np.int64) for claim in many]
        return sample_ids(np.concatenate(positions), self.size, self.seed) if positions else np.empty(0, np.int64)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, with ranges that touch joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def _insert_held(ranges: list[tuple[int, int, int]], new: tuple[int, int, int]) -> None:
    """Keep `ranges` sorted; join with the range before when it touches and is of the same round."""
    at = bisect_right(ranges, new)
    if at and ranges[at - 1][1] == new[0] and ranges[at - 1][2] == new[2]:
        ranges[at - 1] = (ranges[at - 1][0], new[1], new[2])
    else:
        ranges.insert(at, new)
