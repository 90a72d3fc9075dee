"""A simulated cluster: the real protocol, over simulated training, exchange and disk.

Parameters are modelled by their history: a digest of everything that was ever applied. A contribution is a unit of progress with a name
of its own, so that one that is lost or counted twice is seen. The exchange is played out part by part: contributions travel to
owners, owners make averages of what they hold, and averages travel back; each message can be lost, late or doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from tests.simulation.world import Lines, Store, World

from isles import protocol
from isles.protocol import (
    BEAT,
    Apply,
    Attempt,
    Begin,
    Board,
    CatchUp,
    Cease,
    Create,
    Fetch,
    Local,
    MemberRecord,
    Propose,
    ReadyRecord,
    Renew,
    RoundRecord,
    Rules,
    State,
    WriteDone,
    WriteReady,
    after_applying,
    decide,
    given_up,
    pack,
)  # fmt: skip

NO_PROGRESS = 4.0  # seconds without progress after which a peer is blamed


def digest_of(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()


def moved_on(prepared: ReadyRecord | None, exposed: int, applied: int, base: str) -> ReadyRecord | None:
    """A frozen contribution after rounds were skipped."""
    return None if prepared is None or given_up(prepared, exposed) else replace(prepared, round=applied + 1, base=base)


@dataclass
class Average:
    """A whole average: for every chunk, the contributions in it."""

    chunks: tuple[tuple[str, ...], ...]

    @property
    def digest(self) -> str:
        return digest_of(self.chunks)


@dataclass
class Fragment:
    """What a cluster holds of a fragment. applied, base and averages are on its disk (a checkpoint, and the averages since); the rest is
    gone after a crash."""

    applied: int = 0
    base: str = ""
    averages: dict[tuple[int, str], Average] = field(default_factory=dict)
    prepared: ReadyRecord | None = None
    progress: str = ""  # name of what `prepared` holds
    attempt: Attempt | None = None
    record: RoundRecord | None = None  # of the attempt
    serving: RoundRecord | None = None  # of the last attempt, be it over: others may still ask for its averages
    chunks: dict[int, tuple[str, ...]] = field(default_factory=dict)  # averages received in the attempt
    inbox: dict[tuple[int, str, str], str] = field(default_factory=dict)  # (round, cluster, incarnation) -> progress
    blamed: dict[str, float] = field(default_factory=dict)  # since when a peer has made no progress
    reported: dict[str, tuple[float, float]] = field(default_factory=dict)  # since when owners miss a peer, and when last
    exposed: int = 0  # last round in whose exchange `prepared` was shown, and by which process; in the journal
    exposed_as: str = ""
    fetching: bool = False
    busy: set[str] = field(default_factory=set)  # writes that are under way
    trained_since: float = 0.0


class SimCluster:
    """One cluster. `peers` maps names to clusters, itself included."""

    def __init__(
        self, name: str, world: World, lines: Lines, store: Store, rules: Rules, peers: dict[str, SimCluster], *,
        speed: float, outbound_only: bool, observer: Observer,
    ) -> None:  # fmt: skip
        self.name, self.world, self.lines, self.store, self.rules, self.peers = name, world, lines, store, rules, peers
        self.speed, self.outbound_only, self.observer = speed, outbound_only, observer
        self.fragments = [Fragment(base=digest_of("initial", f)) for f in range(len(rules.sizes))]
        self.incarnation, self.up, self.frozen_until, self.state = "", False, 0.0, State.JOINING
        self.boot, self.beat, self.board, self.connection, self.count = 0, 0, Board(), 0, 0
        self.workers_live = False  # through the agent's death, and with them what they trained
        # What is wrong with it, while it lives. "idle": trains nothing; "deaf": completes no average; "silent": neither sends nor
        # answers; "wrong": damages averages.
        self.mute: set[str] = set()

    # --- life and death

    def start(self) -> None:
        self.boot += 1
        self.incarnation = f"{self.boot:08x}"
        self.up, self.state, self.board, self.connection = True, State.JOINING, Board(), self.store.epoch
        for f, old in enumerate(self.fragments):
            self.fragments[f] = new = Fragment(old.applied, old.base, old.averages, trained_since=self.world.now)
            if self.workers_live and old.prepared is not None:
                new.progress, new.exposed, new.exposed_as = old.progress, old.exposed, old.exposed_as
                new.prepared = replace(old.prepared, round=old.applied + 1, incarnation=self.incarnation, base=old.base)
                self.observer.made(self, f, new.progress)
        self.store.watchers[self.name] = self._hear(self.boot)
        self.store.read_all(self.name)
        self.world.log(f"{self.name} starts as {self.incarnation} at rounds {[x.applied for x in self.fragments]}")
        self._tick(self.boot)

    def crash(self, *, workers_live: bool = False) -> None:
        self.up, self.workers_live = False, workers_live
        self.store.watchers.pop(self.name, None)
        self.world.log(f"{self.name} is killed")

    def wipe(self) -> None:
        """Its disk is gone too."""
        self.fragments = [Fragment(base=digest_of("initial", f)) for f in range(len(self.fragments))]
        self.world.log(f"{self.name} has lost its disk")

    def rot(self, f: int) -> None:
        """A bit flips in its global parameters."""
        self.fragments[f].base = digest_of("rot", self.name, self.world.now)
        self.world.log(f"{self.name} holds damaged parameters of {f}/{self.fragments[f].applied}")

    def leave(self) -> None:
        self.state = State.LEAVING
        self.world.log(f"{self.name} leaves")

    def _hear(self, boot: int) -> Callable[[str, bytes, int], None]:
        def hear(key: str, value: bytes, revision: int, epoch: int = 0) -> None:
            if self.boot != boot or not self.up or epoch not in (0, self.store.epoch):
                return
            if self.world.now < self.frozen_until:
                epoch = self.store.epoch
                self.world.after(self.frozen_until - self.world.now, lambda: hear(key, value, revision, epoch))
            elif self.board.put(key, value, revision, self.world.now) and not key.startswith("members"):
                self.act(int(key.split(".")[1]))

        return hear

    def _tick(self, boot: int) -> None:
        if self.boot != boot or not self.up:
            return
        self.world.after(BEAT * self.world.random.uniform(0.9, 1.1), lambda: self._tick(boot))
        if self.world.now < self.frozen_until:
            return
        connected = self.store.epoch if self.store.connected(self.name) else 0
        if connected != self.connection:
            self.board.disconnected(self.world.now)
            if connected:
                self.board.connected(self.world.now)
                self.store.read_all(self.name)
        elif connected and self.world.random.random() < 0.1:
            self.store.read_all(self.name)  # lost notifications are made good, as a watcher does that finds a gap
        self.connection = connected
        self._refresh()
        for f in range(len(self.fragments)):
            self._train(f)
            self.act(f)

    def _refresh(self) -> None:
        self.beat += 1
        in_step = all(
            (seen := self.board.rounds.get(f)) is None or seen.record.open == x.applied + 1
            for f, x in enumerate(self.fragments)
        )
        known = len(self.board.rounds) == len(self.fragments)
        if self.state is State.JOINING and in_step and (known or self.beat > 3):
            self.state = State.ACTIVE
        address = None if self.outbound_only else f"{self.name}:1"
        rounds = tuple(x.applied for x in self.fragments)
        record = MemberRecord(self.name, self.incarnation, self.state, address, beat=self.beat, rounds=rounds)
        self.store.write(self.name, f"members.{self.name}", pack(record), None, lambda _: None)

    # --- training

    def _train(self, f: int) -> None:
        x = self.fragments[f]
        if "idle" in self.mute:
            return
        if x.prepared is None and self.state is not State.LEAVING and self.world.now - x.trained_since >= 3 / self.speed:
            self.count += 1
            x.progress = f"{self.name}/{self.boot}/{f}/{self.count}"
            x.prepared = ReadyRecord(
                x.applied + 1, self.incarnation, x.base, tokens=1, step=self.count, seconds=self.world.now - x.trained_since
            )
            self.observer.made(self, f, x.progress)

    # --- the protocol

    def act(self, f: int) -> None:
        x = self.fragments[f]
        for _ in range(4):  # applying a round may make the next thing possible at once
            attempt = x.attempt
            if attempt is not None:
                attempt = replace(attempt, blamed=self._blamed(x) if attempt.digest is None else ())
            local = Local(
                self.name, self.incarnation, x.applied, x.base, x.prepared, attempt, frozenset(x.averages),
                exposed=(x.exposed, x.exposed_as),
            )  # fmt: skip
            may_propose = self.connection != 0 and self.connection == self.store.epoch
            actions = decide(self.board.view(f, self.world.now), local, self.rules, may_propose=may_propose)
            again = False
            for action in actions:
                again = self._carry_out(f, x, action) or again
            if not again:
                break

    def _blamed(self, x: Fragment) -> tuple[str, ...]:
        now = self.world.now
        stuck = {name for name, since in x.blamed.items() if now - since >= NO_PROGRESS}
        missed = {name for name, (since, last) in x.reported.items() if now - last < 2 and now - since >= NO_PROGRESS}
        return tuple(sorted((stuck | missed) - {self.name}))

    def _carry_out(self, f: int, x: Fragment, action: protocol.Action) -> bool:
        if isinstance(action, Create):
            self._write(x, f"rounds.{f}", pack(action.record), 0)
        elif isinstance(action, Propose):
            self._write(x, f"rounds.{f}", pack(action.record), action.revision)
        elif isinstance(action, WriteReady):
            self._write(x, f"ready.{f}.{self.name}", pack(action.record), None)
        elif isinstance(action, WriteDone):
            self._write(x, f"done.{f}.{self.name}", pack(action.record), None)
        elif isinstance(action, Begin):
            self._begin(f, x, action.record)
        elif isinstance(action, Cease):
            x.attempt = x.record = None
        elif isinstance(action, Apply):
            self._apply(f, x, action)
            return True
        elif isinstance(action, Fetch):
            self._fetch(f, x, action)
        elif isinstance(action, CatchUp):
            self._catch_up(f, x)
        elif isinstance(action, Renew):
            self._catch_up(f, x, action.base)
        return False

    def _write(self, x: Fragment, key: str, value: bytes, expected: int | None) -> None:
        if key in x.busy:
            return
        x.busy.add(key)
        boot, f = self.boot, int(key.split(".")[1])

        def reply(outcome: bool | None) -> None:
            if boot != self.boot or not self.up:
                return
            self.fragments[f].busy.discard(key)
            if outcome is None:
                self.store.read_all(self.name)

        self.store.write(self.name, key, value, expected, reply)

    # --- the exchange

    def _begin(self, f: int, x: Fragment, record: RoundRecord) -> None:
        x.attempt, x.record, x.chunks = Attempt(record.number, record.attempt), record, {}
        x.serving = record
        x.blamed, x.reported, x.exposed, x.exposed_as = {}, {}, record.number, self.incarnation
        self.world.log(
            f"{self.name} begins {f}/{record.number}.{record.attempt} with {[p.cluster for p in record.participants]}"
        )
        x.inbox[record.number, self.name, self.incarnation] = x.progress
        for owner in sorted({part.owner for part in record.parts}):
            if owner != self.name:
                self._put(f, record, owner, x.progress, self.boot)
            self._get(f, record, owner, self.boot)

    def _current(self, f: int, record: RoundRecord, boot: int) -> bool:
        x = self.fragments[f]
        return self.up and boot == self.boot and x.record is record and x.attempt is not None and x.attempt.digest is None

    def _put(self, f: int, record: RoundRecord, owner: str, progress: str, boot: int) -> None:
        """Send the contribution to an owner, until it says that it has it."""
        if not self._current(f, record, boot):
            return
        peer, key = self.peers[owner], (record.number, self.name, self.incarnation)
        took: list[bool] = []

        def arrive() -> None:
            if not peer.answers():
                return
            peer.fragments[f].inbox[key] = progress
            self.lines.send(owner, self.name, lambda: took.append(True))

        self._reach(f, owner, arrive)
        self.world.after(0.5, lambda: None if took else self._put(f, record, owner, progress, boot))

    def _get(self, f: int, record: RoundRecord, owner: str, boot: int) -> None:
        """Ask an owner for its part's average, until it has it."""
        if not self._current(f, record, boot):
            return
        x, peer = self.fragments[f], self.peers[owner]

        def arrive() -> None:
            if not peer.answers() and peer is not self:
                return
            answer = peer.average_part(f, record)
            self.lines.send(owner, self.name, lambda: take(answer))

        def take(answer: tuple[str, ...] | list[str] | None) -> None:
            if not self._current(f, record, boot) or "deaf" in self.mute:
                return
            x.blamed.pop(owner, None)
            if isinstance(answer, list):
                for name in answer:
                    since, last = x.reported.get(name, (self.world.now, self.world.now))
                    x.reported[name] = (since if self.world.now - last < 2 else self.world.now, self.world.now)
            elif answer is not None:
                for part in record.parts:
                    if part.owner == owner:
                        x.chunks.update(dict.fromkeys(range(part.first, part.stop), answer))
                self._complete(f, x, record)

        self._reach(f, owner, arrive)
        self.world.after(0.5, lambda: None if self._has(x, record, owner) else self._get(f, record, owner, boot))

    def _reach(self, f: int, owner: str, arrive: Callable[[], None]) -> None:
        x, peer = self.fragments[f], self.peers[owner]
        if not peer.up and self.lines.open(self.name, owner):
            x.blamed[owner] = self.world.now - NO_PROGRESS  # refused: nobody is there
        else:
            x.blamed.setdefault(owner, self.world.now)
        if "silent" not in self.mute or owner == self.name:
            self.lines.send(self.name, owner, arrive)

    def answers(self) -> bool:
        return self.up and self.world.now >= self.frozen_until and "silent" not in self.mute

    @staticmethod
    def _has(x: Fragment, record: RoundRecord, owner: str) -> bool:
        return all(part.first in x.chunks for part in record.parts if part.owner == owner)

    def average_part(self, f: int, record: RoundRecord) -> tuple[str, ...] | list[str] | None:
        """As owner: the contributions in the average, or who is missing, or None: this attempt is not known here."""
        x = self.fragments[f]
        if x.serving is None or (x.serving.number, x.serving.attempt) != (record.number, record.attempt):
            return None
        missing = [p.cluster for p in record.participants if (record.number, p.cluster, p.incarnation) not in x.inbox]
        if missing:
            return missing
        return tuple(x.inbox[record.number, p.cluster, p.incarnation] for p in record.participants)

    def _complete(self, f: int, x: Fragment, record: RoundRecord) -> None:
        total = sum(part.stop - part.first for part in record.parts)
        if len(x.chunks) < total or x.attempt is None:
            return
        wrong = ((f"wrong at {self.name}",),) if "wrong" in self.mute else ()
        average = Average(tuple(x.chunks[i] for i in range(total)) + wrong)
        x.averages[record.number, average.digest] = average
        x.attempt = replace(x.attempt, digest=average.digest)
        self.world.log(f"{self.name} holds {f}/{record.number}.{record.attempt} {average.digest[:6]}")
        self.act(f)

    def _apply(self, f: int, x: Fragment, action: Apply) -> None:
        average = x.averages[action.round, action.digest]
        x.applied, x.base = action.round, digest_of(x.base, action.digest)
        if action.contributed:
            x.prepared = None
        x.prepared = after_applying(x.prepared, x.applied, x.base)
        if x.attempt is not None and x.attempt.round <= action.round:
            x.attempt = x.record = None
        x.trained_since = self.world.now if x.prepared is None else x.trained_since
        self.world.log(f"{self.name} applies {f}/{action.round} {action.digest[:6]} contributed={action.contributed}")
        self.observer.applied(self, f, action, average)
        x.averages = {key: a for key, a in x.averages.items() if key[0] > action.round - 4}
        x.inbox = {key: p for key, p in x.inbox.items() if key[0] >= action.round}

    # --- coming late

    def _fetch(self, f: int, x: Fragment, action: Fetch) -> None:
        if x.fetching:
            return
        x.fetching, boot, key = True, self.boot, (action.round, action.digest)
        for peer in self._helpers():
            self._ask(peer, lambda p=peer: p.fragments[f].averages.get(key), lambda a: self._fetched(f, key, a, boot))
        self.world.after(1.0, lambda: setattr(x, "fetching", False))

    def _fetched(self, f: int, key: tuple[int, str], average: Average | None, boot: int) -> None:
        if average is not None and boot == self.boot and self.up:
            x = self.fragments[f]
            x.averages[key] = average
            self.act(f)

    def _catch_up(self, f: int, x: Fragment, base: str | None = None) -> None:
        """Take the state of others that are further on, or, where a base is given, that of the same round with that base."""
        if x.fetching:
            return
        self.state = State.JOINING if self.state is State.ACTIVE else self.state
        if base is not None and x.applied == 0:
            x.base = digest_of("initial", f)  # as the spec says; nobody is needed for that
            x.prepared = moved_on(x.prepared, 0, 0, x.base)
        x.fetching, boot = True, self.boot
        for peer in self._helpers():
            self._ask(
                peer, lambda p=peer: (p.fragments[f].applied, p.fragments[f].base), lambda s: self._caught_up(f, s, boot, base)
            )
        self.world.after(1.0, lambda: setattr(x, "fetching", False))

    def _caught_up(self, f: int, state: tuple[int, str], boot: int, base: str | None) -> None:
        x = self.fragments[f]
        renewed = state == (x.applied, base) and x.base != base
        if boot != self.boot or not self.up or not (renewed or state[0] > x.applied):
            return
        x.applied, x.base = state
        x.attempt = x.record = None
        before, x.prepared = x.prepared, moved_on(x.prepared, x.exposed, x.applied, x.base)
        if before is not None and x.prepared is None:
            self.observer.given_up(x.progress)
        x.trained_since = self.world.now
        self.world.log(f"{self.name} catches up to {f}/{x.applied}")
        self.observer.reached(self, f)
        self.act(f)

    def _helpers(self) -> list[SimCluster]:
        """Who can give this cluster anything: those who can be reached from outside."""
        return [p for p in self.peers.values() if p is not self and p.up and not p.outbound_only]

    def _ask(self, peer: SimCluster, question: Callable[[], object], answer: Callable[..., None]) -> None:
        def arrive() -> None:
            if peer.answers():
                reply = question()
                self.lines.send(peer.name, self.name, lambda: answer(reply))

        if self.mute.isdisjoint({"deaf", "silent"}):
            self.lines.send(self.name, peer.name, arrive)


class Observer:
    """Sees everything and believes nobody; see `checks`."""

    def made(self, cluster: SimCluster, f: int, progress: str) -> None: ...
    def applied(self, cluster: SimCluster, f: int, action: Apply, average: Average) -> None: ...
    def reached(self, cluster: SimCluster, f: int) -> None: ...
    def given_up(self, progress: str) -> None: ...
