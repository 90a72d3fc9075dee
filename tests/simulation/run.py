"""One seeded history: a few clusters, a time of faults, a time of peace, and what must hold throughout.

Safety, checked after every event:
    1. no two clusters ever hold different global parameters for the same round of the same fragment;
    2. nothing is applied that the store's record did not name as committed, and the record never goes back;
    3. no contribution is ever in two rounds.
Progress, checked at the end: once faults stop, every cluster comes to the run's newest round, and rounds go on; what a living cluster
trained is in some round.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.cluster import Average, Observer, SimCluster
from tests.simulation.world import Lines, Store, World

from isles.protocol import Apply, Phase, RoundRecord, Rules, State, parse

FAULTS = 30.0  # seconds of faults
PEACE = 180.0  # seconds of peace that must be enough
MORE = 2  # rounds that every fragment must make in peace


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Outcome:
    """What a history came to."""

    seed: int
    rounds: int
    events: int
    attempts: int  # beyond the first of a round
    faults: int


class Checks(Observer):
    """The promises."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.committed: dict[tuple[int, int], str] = {}
        self.standing: dict[int, RoundRecord] = {}
        self.parameters: dict[tuple[int, int], str] = {}
        self.counted: dict[str, tuple[int, int]] = {}
        self.given: set[str] = set()
        self.trained: dict[tuple[str, int], list[str]] = {}  # by process
        self.attempts = 0
        self.strict = (
            True  # a store that forgets, or a memory that does, breaks promises for a while: then it counts how it ends
        )

    def written(self, key: str, value: bytes) -> None:
        if not key.startswith("rounds."):
            return
        record = parse(RoundRecord, value)
        f, before = record.fragment, self.standing.get(record.fragment)
        self.standing[f] = record
        if self.strict and before is not None and record.number < before.number:
            raise Violation(f"round {f} went back from {before.number} to {record.number}")
        self.attempts += record.phase is Phase.EXCHANGE and record.attempt > 0
        self.world.log(f"store: {f}/{record.number}.{record.attempt} {record.phase} {[p.cluster for p in record.participants]}")
        if record.phase is Phase.COMMITTED:
            first = self.committed.setdefault((f, record.number), record.digest or "")
            if self.strict and first != record.digest:
                raise Violation(f"round {f}/{record.number} was committed twice, as {first} and {record.digest}")

    def applied(self, cluster: SimCluster, f: int, action: Apply, average: Average) -> None:
        if not self.strict:
            return
        if self.committed.get((f, action.round)) != action.digest or average.digest != action.digest:
            raise Violation(f"{cluster.name} applied {f}/{action.round} {action.digest[:6]}, which no record committed")
        for progress in {p for chunk in average.chunks for p in chunk}:
            if self.counted.setdefault(progress, (f, action.round)) != (f, action.round):
                raise Violation(f"{progress} is in rounds {self.counted[progress]} and {(f, action.round)}")
        if len(set(average.chunks)) > 1:
            raise Violation(f"the average of {f}/{action.round} holds different contributions in different chunks")
        self.reached(cluster, f)

    def reached(self, cluster: SimCluster, f: int) -> None:
        x = cluster.fragments[f]
        if self.strict and self.parameters.setdefault((f, x.applied), x.base) != x.base:
            raise Violation(f"{cluster.name} holds other parameters than others after round {f}/{x.applied}")

    def made(self, cluster: SimCluster, f: int, progress: str) -> None:  # noqa: ARG002
        self.trained.setdefault((cluster.name, cluster.boot), []).append(progress)

    def given_up(self, progress: str) -> None:
        self.given.add(progress)

    def settle(self, cluster: SimCluster) -> None:
        """In peace: all that the cluster trained since it started is in a round, but for what waits for the open one."""
        if not self.strict:
            return
        waiting = {x.progress for x in cluster.fragments}
        for progress in self.trained.get((cluster.name, cluster.boot), []):
            if progress not in self.counted and progress not in self.given and progress not in waiting:
                raise Violation(f"{progress}, which {cluster.name} trained, is in no round")


class History:
    """A run of one seed."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.world = world = World(seed)
        world.trace = [] if trace else None
        random = world.random
        self.lines = Lines(world, loss=random.choice([0, 0, 0.02, 0.1]), slow=random.choice([0.01, 0.05, 0.3]))
        self.store, self.checks, self.faults = Store(world, self.lines), Checks(world), 0
        self.store.on_write = self.checks.written
        count = random.choice([1, 2, 2, 3, 3, 4, 5])
        quorum = random.choice([None, None, max(1, count - 1)])
        sizes = (100_000,) if random.random() < 0.7 else (100_000, 50_000)
        late = random.randrange(1, count) if count > 1 and random.random() < 0.3 else None  # comes when the run is under way
        rules = Rules(sizes, start=count - (late is not None), quorum=quorum, grace=random.choice([0, 0.2]))
        self.clusters: dict[str, SimCluster] = {}
        for i in range(count):
            name = f"c{i}"
            self.clusters[name] = SimCluster(
                name, world, self.lines, self.store, rules, self.clusters, speed=random.choice([1, 1, 1, 0.5]),
                outbound_only=i > 0 and random.random() < 0.15, observer=self.checks,
            )  # fmt: skip
        for i, cluster in enumerate(self.clusters.values()):
            world.after(
                random.uniform(5, 25) if i == late else random.uniform(0, 2), lambda c=cluster: None if c.up else c.start()
            )
        self.forgets = random.random() < 0.08  # the store loses its last writes when it falls
        self.rots = count > 2 and random.random() < 0.08
        self.checks.strict = not (self.forgets or self.rots)
        self.rotten: tuple[SimCluster, int, str] | None = (
            None  # whose parameters are damaged, of which fragment, and their digest
        )
        self.lame: SimCluster | None = None  # is alive but not well, in peace too
        self.apart: frozenset[str] = frozenset()  # never talk to each other, in peace neither
        if random.random() < 0.15:
            world.after(random.uniform(4, FAULTS), self._for_good)

    def _for_good(self) -> None:
        """Something goes wrong that is never set right."""
        random, clusters = self.world.random, list(self.clusters.values())
        kind, cluster = random.choice(["idle", "deaf", "silent", "apart", "wrong"]), random.choice(clusters)
        others = [c for c in clusters if c is not cluster and not c.outbound_only]
        if kind == "apart" and len(others) > 1:
            self.apart = frozenset((cluster.name, random.choice(others).name))
            self.lines.cut.add(self.apart)
        elif kind != "apart" and len(others) > (kind == "wrong"):
            self.lame = cluster
            cluster.mute.add(kind)
            self.checks.strict &= kind != "wrong"
        self.world.log(f"for good: {kind} {cluster.name} {sorted(self.apart)}")

    def run(self) -> Outcome:
        """Play it out. Raises Violation."""
        events = self._until(4.0)
        while self.world.now < FAULTS:
            self._fault()
            events += self._until(self.world.now + self.world.random.expovariate(1 / 2.5))
        self._make_peace()
        goal = [record.number + MORE for _, record in sorted(self.checks.standing.items())] or [MORE]
        end = self.world.now + PEACE
        while self.world.now < end and not self._arrived(goal):
            events += self._until(self.world.now + 1.0)
        if not self._arrived(goal) and not (self.lame and not self._applied_elsewhere(self.lame)):
            rounds = {n: [x.applied for x in c.fragments] for n, c in self.clusters.items()}
            raise Violation(f"{PEACE:.0f} s of peace were not enough to reach {goal}: {rounds}")
        for cluster in self.clusters.values():
            if cluster is not self.lame and cluster.name not in self.apart:
                self.checks.settle(cluster)
        newest = max((number for _, number in self.checks.committed), default=0)
        return Outcome(self.world.seed, newest, events, self.checks.attempts, self.faults)

    def _until(self, time: float) -> int:
        done: list[bool] = []
        self.world.after(max(0.0, time - self.world.now), lambda: done.append(True))
        events = 0
        while not done and self.world.step():
            events += 1
        return events

    def _arrived(self, goal: list[int]) -> bool:
        well = [c for c in self.clusters.values() if c is not self.lame]
        there = all(c.up and all(x.applied >= g for x, g in zip(c.fragments, goal, strict=False)) for c in well)
        return there and (self.checks.strict or len({tuple((x.applied, x.base) for x in c.fragments) for c in well}) == 1)

    def _fault(self) -> None:
        """One thing goes wrong, and is set right some time later (or not before peace)."""
        random, world = self.world.random, self.world
        self.faults += 1
        cluster = random.choice(list(self.clusters.values()))
        kind = random.choice(["kill", "kill", "agent", "cut", "cut", "store", "store-cut", "freeze", "leave", "wipe"])
        lasting = random.expovariate(1 / 3.0)
        world.log(f"fault: {kind} {cluster.name} for {lasting:.1f} s")
        stay = [c for c in self.clusters.values() if c is not cluster and not c.outbound_only and c.state is not State.LEAVING]
        if kind == "leave" and not stay and any(c.outbound_only for c in self.clusters.values()):
            kind = (
                "kill"  # nobody could be reached any more, and what the others do alone stays out of reach for who comes back
            )
        if kind == "wipe" and (not self._stored_elsewhere(cluster) or self._damaged()):
            kind = "kill"
        if self.rots and random.random() < 0.2 and cluster.up and self._applied_elsewhere(cluster):
            f = random.randrange(len(cluster.fragments))
            cluster.rot(f)
            self.rots, self.rotten = False, (cluster, f, cluster.fragments[f].base)
        elif kind in ("kill", "agent", "wipe") and cluster.up:
            cluster.crash(workers_live=kind == "agent")
            if kind == "wipe":
                cluster.wipe()
            world.after(lasting, lambda: None if cluster.up else cluster.start())
        elif kind == "leave" and cluster.up:
            cluster.leave()
            world.after(lasting, cluster.crash)
            world.after(lasting + random.uniform(0, 5), lambda: None if cluster.up else cluster.start())
        elif kind == "freeze":
            cluster.frozen_until = world.now + 3 * lasting
        elif kind == "store":
            self.store.stop()
            lost = random.choice([0, 1, 3, 10, 30, 1 << 30]) if self.forgets else 0
            world.after(lasting, lambda: self.store.restart(lost))
        elif kind in ("cut", "store-cut"):
            other = "store" if kind == "store-cut" else random.choice(list(self.clusters))
            pair = frozenset((cluster.name, other))
            self.lines.cut.add(pair)
            world.after(lasting, lambda: None if pair == self.apart else self.lines.cut.discard(pair))

    def _damaged(self) -> bool:
        """Whether there are parameters that do not count as a copy."""
        return self.rotten is not None and self.rotten[0].fragments[self.rotten[1]].base == self.rotten[2]

    def _applied_elsewhere(self, cluster: SimCluster) -> bool:
        """Whether somebody else who can be reached holds every round: a run cannot outlive the only copy of one."""
        others = [c for c in self.clusters.values() if c.up and c is not cluster and not c.outbound_only]
        newest = [max([n for g, n in self.checks.committed if g == f], default=0) for f in range(len(cluster.fragments))]
        return all(any(c.fragments[f].applied >= number for c in others) for f, number in enumerate(newest))

    def _stored_elsewhere(self, cluster: SimCluster) -> bool:
        """Whether the others have on their disks all that this one has, be it about to be committed."""
        others = [c for c in self.clusters.values() if c.up and c is not cluster and not c.outbound_only]
        coming = [
            (f, key) for f, x in enumerate(cluster.fragments) for key in x.averages if (f, key[0]) not in self.checks.committed
        ]
        return self._applied_elsewhere(cluster) and all(
            any(key in c.fragments[f].averages for c in others) for f, key in coming
        )

    def _make_peace(self) -> None:
        self.world.log("peace")
        self.lines.cut = {self.apart} - {frozenset()}
        self.lines.loss = 0.0
        self.store.restart()
        for cluster in self.clusters.values():
            cluster.frozen_until = 0.0
            if cluster.up and cluster.state.value == "leaving":
                cluster.crash()
            if not cluster.up:
                cluster.start()


def play(seed: int, *, trace: bool = False) -> Outcome:
    """Play one seed. Raises Violation, whose text ends with the seed."""
    history = History(seed, trace=trace)
    try:
        return history.run()
    except Violation as error:
        if history.world.trace is not None:
            print("\n".join(history.world.trace))
        raise Violation(f"{error} (seed {seed})") from None
