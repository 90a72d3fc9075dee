"""The rounds of a simulated run, in virtual time: who is ready, when a round closes, when its result is merged.

One tick is the time a cluster of full speed needs for a local step. Each fragment has a clock of its own. A round of a
fragment *closes* when every expected cluster is ready, or when a quorum is and the grace has passed; the contributions are
taken at that moment. Its result is *merged* tau ticks later, by late clusters too, which keep their progress for the next
round. All decisions are in this file; the arithmetic is in `isles.outer` and `isles.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isles.codec import Codec, NonFiniteError, rounding_seed
from isles.errors import DivergedError
from isles.exchange import Contribution, average, bytes_on_wire, decode_chunks, encode_contribution
from isles.model import Layout
from isles.outer import OuterOptimizer
from isles.simulator.cluster import Cluster
from isles.spec import Spec

Floats = NDArray[np.float32]


@dataclass
class InFlight:
    """A closed round whose result has not been merged yet."""

    merge_at: int  # tick
    contributors: frozenset[int]
    values: Floats  # the decoded average


@dataclass
class FragmentClock:
    """One fragment's position in its rounds."""

    index: int
    start: int
    stop: int
    tensors: list[tuple[int, int]]  # within the fragment
    need: int  # local steps that make a cluster of full speed ready
    round: int = 0  # rounds closed
    quorum_since: int | None = None  # tick at which the quorum was first ready
    expected: set[int] = field(default_factory=set)  # clusters that this round waits for
    in_flight: list[InFlight] = field(default_factory=list)  # oldest first


class Rounds:
    """Closes and merges rounds over the clusters of a run; owns the global parameters.

    values: the global parameters, fp32, shape [layout.total], updated in place."""

    def __init__(self, spec: Spec, layout: Layout, codec: Codec, outer: OuterOptimizer, values: Floats) -> None:
        self.spec, self.layout, self.codec, self.outer, self.values = spec, layout, codec, outer, values
        self.clocks = [self._clock(i, *bounds) for i, bounds in enumerate(layout.fragments)]
        self.bytes = 0  # sent by all clusters together

    def _clock(self, index: int, start: int, stop: int) -> FragmentClock:
        h, count = self.spec.train.local_steps_at(0), len(self.layout.fragments)
        slots = [s for s in self.layout.slots if s.fragment == index]
        tensors = [(s.offset - start, s.offset - start + s.numel) for s in slots]
        clock = FragmentClock(index, start, stop, tensors, need=index * h // count or h)  # fragments take even turns
        clock.expected = set(range(self.spec.clusters.count))
        return clock

    @property
    def committed(self) -> int:
        """Rounds merged, all fragments together."""
        return sum(clock.round - len(clock.in_flight) for clock in self.clocks)

    def need(self, clock: FragmentClock, cluster: Cluster) -> int:
        """Local steps that make this cluster ready."""
        scale = cluster.speed if self.spec.clusters.pace == "scale" else 1.0
        return max(1, round(clock.need * scale))

    def is_late(self, cluster: Cluster, now: int) -> bool:
        """Whether a planned event keeps the cluster from taking part at tick `now`."""
        events = self.spec.clusters.events
        return any(e.kind == "late" and e.cluster == cluster.number and e.step <= now < (e.until or 0) for e in events)

    def must_wait(self, cluster: Cluster, now: int) -> bool:
        """Whether the cluster has done its share, and the slack that overlap leaves, and stands still until the round closes."""
        if self.spec.clusters.pace != "wait" or self.is_late(cluster, now):
            return False
        for clock, standing in zip(self.clocks, cluster.standings, strict=True):
            need = self.need(clock, cluster)
            if standing.since_sent >= need and standing.since_close >= need + self.spec.streaming.overlap:
                return True
        return False

    def advance(self, clusters: Sequence[Cluster], now: int) -> list[int]:
        """Close and merge whatever is due after `now` ticks. Returns the fragments that were merged."""
        merged = []
        active = [c for c in clusters if c.active]
        for clock in self.clocks:
            ready = self._ready(clock, active, now)
            if ready:
                self._close(clock, ready, active, now)
            if self._merge_due(clock, active, now):
                merged.append(clock.index)
        return merged

    def _ready(self, clock: FragmentClock, active: Sequence[Cluster], now: int) -> list[Cluster]:
        """The contributors, if the round can close now; otherwise nobody."""
        ready = [c for c in active if c.standings[clock.index].since_sent >= self.need(clock, c) and not self.is_late(c, now)]
        numbers = {c.number for c in ready}
        expected = {c.number for c in active} & clock.expected
        if ready and expected <= numbers:
            return ready
        quorum = self.spec.clusters.quorum
        if quorum is None or len(ready) < min(quorum, len(active)):
            clock.quorum_since = None
            return []
        if clock.quorum_since is None:
            clock.quorum_since = now
        return ready if now - clock.quorum_since >= self.spec.clusters.grace else []

    def _close(self, clock: FragmentClock, ready: Sequence[Cluster], active: Sequence[Cluster], now: int) -> None:
        g = self.values[clock.start : clock.stop]
        locals_ = {c.number: c.trainer.read(clock.start, clock.stop) for c in ready}
        contributions = [self._contribution(clock, c, g, locals_[c.number]) for c in ready]
        seed = rounding_seed(self.spec.run.seed, clock.index, clock.round + 1, "average")
        mean = average(self.codec, contributions, self.spec.outer, clock.tensors, start=clock.start, size=g.size, seed=seed)
        self.bytes += bytes_on_wire(self.codec, contributions, mean, len(active))
        shares = dict(zip(sorted(c.cluster for c in contributions), mean.weights, strict=True))
        for cluster, contribution in zip(ready, contributions, strict=True):
            self._hand_off(clock, cluster, contribution, shares[cluster.name], g, locals_[cluster.number])
        for cluster in active:
            cluster.standings[clock.index].since_close = 0
        merge_at = now + self.spec.streaming.overlap
        clock.in_flight.append(InFlight(merge_at, frozenset(c.number for c in ready), mean.values))
        clock.round += 1
        clock.need = self.spec.train.local_steps_at(now)
        clock.quorum_since, clock.expected = None, {c.number for c in active}

    def _contribution(self, clock: FragmentClock, cluster: Cluster, g: Floats, x: Floats) -> Contribution:
        standing = cluster.standings[clock.index]
        residual = None if cluster.residual is None else cluster.residual[clock.start : clock.stop]
        try:
            return encode_contribution(
                self.codec, standing.local.base(g), x, start=clock.start, cluster=cluster.name, tokens=standing.tokens,
                seed=rounding_seed(self.spec.run.seed, clock.index, clock.round + 1, cluster.name), residual=residual,
            )  # fmt: skip
        except NonFiniteError as error:
            name = self.layout.name_at(error.index)
            raise DivergedError(
                f"{cluster.name}'s pseudo-gradient of {name} in round {clock.round + 1} is not finite; lower optimizer.lr or outer.lr"
            ) from error

    def _hand_off(
        self, clock: FragmentClock, cluster: Cluster, contribution: Contribution, share: float, g: Floats, x: Floats
    ) -> None:
        standing = cluster.standings[clock.index]
        own = None
        if self.spec.streaming.merge == "eager" and self.spec.streaming.overlap:
            own = np.float32(share) * decode_chunks(contribution.chunks, g.size)
        standing.local.handed_off(x, g, own)
        if own is not None:
            cluster.trainer.write(clock.start, x)
        standing.since_sent = standing.tokens = 0

    def _merge_due(self, clock: FragmentClock, active: Sequence[Cluster], now: int) -> bool:
        merged = False
        while clock.in_flight and clock.in_flight[0].merge_at <= now:
            flight = clock.in_flight.pop(0)
            g_old = self.values[clock.start : clock.stop].copy()
            self.outer.step_range(clock.start, clock.stop, flight.values)
            g_new = self.values[clock.start : clock.stop]
            for cluster in active:
                x = cluster.trainer.read(clock.start, clock.stop)
                cluster.standings[clock.index].local.merge(x, g_old, g_new, contributed=cluster.number in flight.contributors)
                cluster.trainer.write(clock.start, x)
            merged = True
        return merged

    def forget(self, cluster: Cluster) -> None:
        """A cluster left: what it has in flight stays in the averages, but when it comes back it starts from the result."""
        for clock in self.clocks:
            for flight in clock.in_flight:
                flight.contributors -= {cluster.number}

    def drain(self, clusters: Sequence[Cluster], now: int) -> None:
        """End of the run: merge what is in flight, then one last round of every fragment that has progress nobody has sent."""
        active = [c for c in clusters if c.active]
        for clock in self.clocks:
            self._merge_due(clock, active, now + self.spec.streaming.overlap)
            ready = [c for c in active if c.standings[clock.index].since_sent and not self.is_late(c, now)]
            if ready:
                self._close(clock, ready, active, now)
                self._merge_due(clock, active, now + self.spec.streaming.overlap)


def in_flight_tensors(clocks: Sequence[FragmentClock]) -> dict[str, torch.Tensor]:
    """The averages that wait to be merged, for a checkpoint."""
    return {f"in_flight.{c.index}.{i}": torch.from_numpy(f.values) for c in clocks for i, f in enumerate(c.in_flight)}


def clock_counters(clock: FragmentClock) -> dict[str, Any]:
    return {
        "round": clock.round,
        "need": clock.need,
        "quorum_since": clock.quorum_since,
        "expected": sorted(clock.expected),
        "in_flight": [[f.merge_at, sorted(f.contributors)] for f in clock.in_flight],
    }


def load_clock(clock: FragmentClock, counters: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Undo `clock_counters` and `in_flight_tensors`."""
    clock.round, clock.need, clock.quorum_since = counters["round"], counters["need"], counters["quorum_since"]
    clock.expected = set(counters["expected"])
    clock.in_flight = [
        InFlight(merge_at, frozenset(contributors), tensors[f"in_flight.{clock.index}.{i}"].numpy().copy())
        for i, (merge_at, contributors) in enumerate(counters["in_flight"])
    ]
