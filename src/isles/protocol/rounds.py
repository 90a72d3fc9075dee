"""The transitions of a round: the next record as a pure function of the records that stand.

There is no leader. Any cluster may compute `next_round` and write its result by compare-and-set; whoever is first wins, and the others
read what stands then. Two clusters may compute different successors (they see different clocks and stale records); that is harmless,
because only one of them replaces the record. Safety rests on three rules that no timing can break:

    1. A cluster applies round n only if it applied n - 1, the record says committed, and it holds an average of the recorded digest.
    2. A round is committed only on the word of participants that hold its whole average, and all of them the same one.
    3. A participant is a process, not a name: with a new incarnation it is another.

    train n, committed n - 1   --- a quorum is ready -------------------------->  exchange n, attempt a
    exchange n, attempt a      --- most participants hold the same average ---->  committed n
    exchange n, attempt a      --- a participant is lost or voted out --------->  exchange n, attempt a + 1, with the survivors
    exchange n, attempt a      --- nobody is left who could own a part -------->  train n
    exchange n, attempt a      --- who takes part hangs, others are ready ------->  train n

Time decides only whom to wait for, never what is applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from isles.protocol.board import LEASE, View
from isles.protocol.parts import chunk_values, plan_parts, replan_parts
from isles.protocol.records import Participant, Phase, ReadyRecord, RoundRecord, State

AFRESH = 1 << 20  # attempts in a store that had lost what it held count from here, where no earlier attempt has come
PATIENCE = 2.0  # a cluster that is alive but needs longer than this many times the others' training is not waited for


@dataclass(frozen=True)
class Rules:
    """What a run's spec says about rounds. sizes: values of each fragment. start: clusters that must be there before the first round.
    quorum: clusters that must be ready, all when None. grace: how long a round with its quorum stays open, as a share of the time
    that the ready ones trained. steps: local steps of the run; nobody begins a round after one in which a cluster has done them. 0: no end."""

    sizes: tuple[int, ...]
    start: int = 1
    quorum: int | None = None
    grace: float = 0.0
    steps: int = 0

    def over(self, record: RoundRecord) -> bool:
        """Whether a fragment's last round is committed."""
        return record.phase is Phase.COMMITTED and 0 < self.steps <= record.step


def first_round(fragment: int, base: str, applied: int = 0, revision: int = 0, step: int = 0) -> RoundRecord:
    """The record that a run begins with. base: digest of the initial parameters, which every cluster must share.

    A store that has lost what it held begins with the round after the last that was applied, and at the run's step; revision: of what it
    still shows."""
    if not applied:
        return RoundRecord(fragment, 1, Phase.TRAIN, base=base)
    return RoundRecord(fragment, applied + 1, Phase.TRAIN, AFRESH + revision, base=base, step=step)


def next_round(view: View, rules: Rules) -> RoundRecord | None:
    """The record that should replace the one that stands, or None while it should stand."""
    if view.round is None:
        return None
    record = view.round.record
    return _after_exchange(view, record) if record.phase is Phase.EXCHANGE else _close(view, record, rules)


def _close(view: View, record: RoundRecord, rules: Rules) -> RoundRecord | None:
    """Open round -> exchange."""
    if rules.over(record):
        return None
    ready = _candidates(view, record)
    active = {name for name, m in view.members.items() if m.record.state is State.ACTIVE and view.alive(name)}
    if not ready or (len(active) < rules.start and not _begun(view, record)):
        return None
    expected = active - _astray(view, record, ready)
    if not expected <= ready.keys() and not _waited(view, ready, len(expected), rules):
        return None
    owners = _owners(view, ready)
    if not owners:
        return None  # none that is ready can be reached from outside
    size = rules.sizes[view.fragment]
    chunk = chunk_values(size, len(ready))
    return RoundRecord(
        fragment=view.fragment,
        number=record.open,
        phase=Phase.EXCHANGE,
        attempt=record.attempt + 1 if record.phase is Phase.TRAIN and record.attempt else 0,  # never the same number twice
        participants=tuple(Participant(c, r.incarnation, r.tokens, r.ranges) for c, r in sorted(ready.items())),
        parts=plan_parts(-(-size // chunk), owners, len(ready)),
        chunk=chunk,
        base=next(iter(ready.values())).base,
        previous=record.digest if record.phase is Phase.COMMITTED else record.previous,
        before=record.participants if record.phase is Phase.COMMITTED else record.before,
        step=max(record.step, max(r.step for r in ready.values())),
    )


def _begun(view: View, record: RoundRecord) -> bool:
    """Whether the run has: with this fragment, or with another one."""
    return record.open > 1 or record.attempt > 0 or any(any(m.record.rounds) for m in view.members.values())


def _candidates(view: View, record: RoundRecord) -> dict[str, ReadyRecord]:
    """Clusters whose contribution to the open round could be exchanged now: alive, ready, and measured from the same parameters."""
    ready = {}
    for name, seen in view.ready.items():
        member = view.members.get(name)
        fits = seen.record.round == record.open and view.alive(name, seen.record.incarnation)
        if fits and member is not None and member.record.state is not State.JOINING:
            ready[name] = seen.record
    bases = Counter(r.base for r in ready.values())
    servable = {ready[name].base for name in _owners(view, ready)}  # by somebody who can be reached
    if record.phase is not Phase.COMMITTED and record.base is not None:
        base = record.base
    else:  # a cluster whose parameters differ from the others' has a broken memory or disk; it is left out until it has fetched them anew
        base = min(bases, key=lambda b: (b not in servable, -bases[b], b), default="")
    return {name: r for name, r in ready.items() if r.base == base}


def _astray(view: View, record: RoundRecord, ready: Mapping[str, ReadyRecord]) -> set[str]:
    """Clusters that are ready for the open round, but from other parameters than those of `ready`: there is nothing to wait for."""
    others = {name: seen.record for name, seen in view.ready.items() if name not in ready}
    bases = {r.base for r in ready.values()}
    return {n for n, r in others.items() if r.round == record.open and r.base not in bases and view.alive(n, r.incarnation)}


def _waited(view: View, ready: Mapping[str, ReadyRecord], expected: int, rules: Rules) -> bool:
    """Whether those who are not ready have been waited for long enough."""
    standing = sorted((view.stood(view.ready[name]) for name in ready), reverse=True)
    trained = median(r.seconds for r in ready.values())
    if rules.quorum is not None and len(ready) >= min(rules.quorum, expected):
        return standing[min(rules.quorum, expected) - 1] >= rules.grace * trained
    return standing[0] >= PATIENCE * trained + LEASE


def _owners(view: View, participants: Iterable[str]) -> dict[str, float]:
    """Who can own a part, with the speed of its line in bytes/s. Who cannot be reached owns none, alone neither: of what it did by
    itself nobody else could ever get hold, and all others would be shut out for good."""
    owners = {}
    for name in participants:
        member = view.members[name].record
        if member.address is not None:
            owners[name] = float(min((rate for rate in (member.up, member.down) if rate), default=0))
    return owners


def _after_exchange(view: View, record: RoundRecord) -> RoundRecord | None:
    """Exchange -> committed, next attempt, or back to training."""
    alive = [p for p in record.participants if view.alive(p.cluster, p.incarnation)]
    holders = {p.cluster: digest for p in alive if (digest := _held(view, record, p)) is not None}
    digests = set(holders.values())
    if len(digests) == 1 and _owners(view, holders) and (2 * len(holders) > len(alive) or _held_long(view, holders)):
        return replace(record, phase=Phase.COMMITTED, digest=digests.pop())
    out = _voted_out(view, record, alive) if not holders else None
    survivors = {p.cluster: p for p in alive if p.cluster != out}
    if len(digests) > 1:  # the same attempt with two results: somebody's memory failed, so it is made again
        return _without_the_wrong(view, record, survivors, holders)
    if _hung(view, record, len(survivors), holders):
        return _reopened(record)
    if len(survivors) == len(record.participants) and _owners(view, survivors):
        return None
    return _retry(view, record, survivors)


def _without_the_wrong(
    view: View, record: RoundRecord, survivors: Mapping[str, Participant], holders: Mapping[str, str]
) -> RoundRecord:
    """The next attempt after two results: without those whom most contradict, else with all who can take part and may tell."""
    digest, count = Counter(holders.values()).most_common(1)[0]
    if 2 * count > len(survivors):
        return _retry(view, record, {n: p for n, p in survivors.items() if holders.get(n, digest) == digest})
    return _reopened(record) if _outside(view, record) else _retry(view, record, survivors)


def _outside(view: View, record: RoundRecord) -> dict[str, ReadyRecord]:
    """Clusters that could be in the round and are not in this attempt."""
    names = {p.cluster for p in record.participants}
    return {name: ready for name, ready in _candidates(view, record).items() if name not in names}


def _hung(view: View, record: RoundRecord, survivors: int, holders: Mapping[str, str]) -> bool:
    """Whether those of whom nobody complains hold up others: one that is alone and needs no line should be done by now; and where only
    clusters that nobody can reach hold the average for long, those who could hand it on fail to take it."""
    outside = _outside(view, record)
    if view.round is None or not outside:
        return False
    if holders:
        return not _owners(view, holders) and bool(_owners(view, outside)) and _held_long(view, holders)
    return survivors == 1 and view.stood(view.round) >= median(r.seconds for r in outside.values()) + LEASE


def _held_long(view: View, holders: Mapping[str, str]) -> bool:
    """Whether the first has held the average for as long as it took to get, and a lease: those who do not hold it yet need not be waited
    for any more (they can fetch it; the holders have it on their disks)."""
    held = max((view.stood(view.done[name]) for name in holders), default=0.0)
    return held >= LEASE and view.round is not None and 2 * held >= view.stood(view.round)


def _held(view: View, record: RoundRecord, participant: Participant) -> str | None:
    """Digest of the whole average that a participant reports to hold."""
    seen = view.done.get(participant.cluster)
    if seen is None:
        return None
    done = seen.record
    same = (done.round, done.attempt, done.incarnation) == (record.number, record.attempt, participant.incarnation)
    return done.digest if same else None


def _voted_out(view: View, record: RoundRecord, alive: list[Participant]) -> str | None:
    """The participant that the others cannot get on with: most of them say so, or one does and the member misses refreshes.
    One at a time; of two that blame each other equally the later name goes."""
    votes: Counter[str] = Counter()
    for p in alive:
        seen = view.done.get(p.cluster)
        if seen is None:
            continue
        done = seen.record
        if (done.round, done.attempt, done.incarnation) == (record.number, record.attempt, p.incarnation):
            votes.update(name for name in set(done.blamed) if name != p.cluster)
    names = {p.cluster for p in alive}
    guilty = [n for n, count in votes.items() if n in names and (2 * count > len(alive) - 1 or view.suspect(n))]
    return max(guilty, key=lambda n: (view.suspect(n), votes[n], n), default=None)


def _retry(view: View, record: RoundRecord, survivors: Mapping[str, Participant]) -> RoundRecord:
    """The next attempt. Who owned a part and is still there keeps it, with all contributions that it already holds."""
    owners = _owners(view, survivors)
    if not owners:
        return _reopened(record)
    return replace(
        record,
        attempt=record.attempt + 1,
        participants=tuple(p for p in record.participants if p.cluster in survivors),
        parts=replan_parts(record.parts, owners, len(survivors)),
    )


def _reopened(record: RoundRecord) -> RoundRecord:
    """Back to training for the same round."""
    return replace(record, phase=Phase.TRAIN, attempt=record.attempt + 1, participants=(), parts=(), chunk=0)
