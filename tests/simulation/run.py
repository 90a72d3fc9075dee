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

from isles.protocol import Apply, Phase, RoundRecord, Rules, parse

FAULTS = 30.0  # seconds of faults
PEACE = 120.0  # seconds of peace that must be enough
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

    def written(self, key: str, value: bytes) -> None:
        if not key.startswith("rounds."):
            return
        record = parse(RoundRecord, value)
        f, before = record.fragment, self.standing.get(record.fragment)
        self.standing[f] = record
        if before is not None and record.number < before.number:
            raise Violation(f"round {f} went back from {before.number} to {record.number}")
        self.attempts += record.phase is Phase.EXCHANGE and record.attempt > 0
        self.world.log(f"store: {f}/{record.number}.{record.attempt} {record.phase} {[p.cluster for p in record.participants]}")
        if record.phase is Phase.COMMITTED:
            first = self.committed.setdefault((f, record.number), record.digest or "")
            if first != record.digest:
                raise Violation(f"round {f}/{record.number} was committed twice, as {first} and {record.digest}")

    def applied(self, cluster: SimCluster, f: int, action: Apply, average: Average) -> None:
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
        if self.parameters.setdefault((f, x.applied), x.base) != x.base:
            raise Violation(f"{cluster.name} holds other parameters than others after round {f}/{x.applied}")

    def made(self, cluster: SimCluster, f: int, progress: str) -> None:  # noqa: ARG002
        self.trained.setdefault((cluster.name, cluster.boot), []).append(progress)

    def given_up(self, progress: str) -> None:
        self.given.add(progress)

    def settle(self, cluster: SimCluster) -> None:
        """In peace: all that the cluster trained since it started is in a round, but for what waits for the open one."""
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
        rules = Rules(sizes, start=count, quorum=quorum, grace=random.choice([0, 0.2]))
        self.clusters: dict[str, SimCluster] = {}
        for i in range(count):
            name = f"c{i}"
            self.clusters[name] = SimCluster(
                name, world, self.lines, self.store, rules, self.clusters, speed=random.choice([1, 1, 1, 0.5]),
                outbound_only=i > 0 and random.random() < 0.15, observer=self.checks,
            )  # fmt: skip
        for cluster in self.clusters.values():
            world.after(random.uniform(0, 2), cluster.start)

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
        if not self._arrived(goal):
            rounds = {n: [x.applied for x in c.fragments] for n, c in self.clusters.items()}
            raise Violation(f"{PEACE:.0f} s of peace were not enough to reach {goal}: {rounds}")
        for cluster in self.clusters.values():
            self.checks.settle(cluster)
        newest = max(number for _, number in self.checks.committed)
        return Outcome(self.world.seed, newest, events, self.checks.attempts, self.faults)

    def _until(self, time: float) -> int:
        done: list[bool] = []
        self.world.after(max(0.0, time - self.world.now), lambda: done.append(True))
        events = 0
        while not done and self.world.step():
            events += 1
        return events

    def _arrived(self, goal: list[int]) -> bool:
        return all(
            c.up and all(x.applied >= g for x, g in zip(c.fragments, goal, strict=False)) for c in self.clusters.values()
        )

    def _fault(self) -> None:
        """One thing goes wrong, and is set right some time later (or not before peace)."""
        random, world = self.world.random, self.world
        self.faults += 1
        cluster = random.choice(list(self.clusters.values()))
        kind = random.choice(["kill", "kill", "kill", "cut", "cut", "store", "store-cut", "freeze", "leave", "wipe"])
        lasting = random.expovariate(1 / 3.0)
        world.log(f"fault: {kind} {cluster.name} for {lasting:.1f} s")
        if kind == "wipe" and not self._stored_elsewhere(cluster):
            kind = "kill"
        if kind in ("kill", "wipe") and cluster.up:
            cluster.crash()
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
            world.after(lasting, self.store.restart)
        elif kind in ("cut", "store-cut"):
            other = "store" if kind == "store-cut" else random.choice(list(self.clusters))
            pair = frozenset((cluster.name, other))
            self.lines.cut.add(pair)
            world.after(lasting, lambda: self.lines.cut.discard(pair))

    def _stored_elsewhere(self, cluster: SimCluster) -> bool:
        """Whether the others have on their disks all that this one has: a run cannot outlive the only copy of a round."""
        others = [c for c in self.clusters.values() if c.up and c is not cluster]
        for f, x in enumerate(cluster.fragments):
            newest = max([n for g, n in self.checks.committed if g == f], default=0)
            if not any(c.fragments[f].applied >= newest for c in others):
                return False
            if any(not any(key in c.fragments[f].averages for c in others) for key in x.averages if key[0] > newest):
                return False
        return True

    def _make_peace(self) -> None:
        self.world.log("peace")
        self.lines.cut.clear()
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
