"""One cluster's part in the protocol: what it should do next, as a pure function of what it sees and what it holds.

`decide` looks at the state of things and not at events, so nothing is lost when a message is: asked again, it says the same again
until the store shows that it was done. The caller carries the actions out, in order, and asks anew whenever anything changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isles.protocol.board import View
from isles.protocol.records import DoneRecord, Participant, Phase, ReadyRecord, RoundRecord
from isles.protocol.rounds import Rules, first_round, next_round


@dataclass(frozen=True, slots=True)
class Attempt:
    """An exchange that this cluster has begun. digest: of the whole average, once it is held. blamed: who holds it up."""

    round: int
    attempt: int
    digest: str | None = None
    blamed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Local:
    """What a cluster holds of one fragment.

    applied: the last round in its global parameters; base: their digest. prepared: its frozen contribution to round applied + 1.
    attempt: the exchange it takes part in. held: (round, digest) of the whole encoded averages on its disk. exposed: the last round in
    whose exchange `prepared` was shown, and by which process; workers, and what they prepared, may outlive the agent. (0, "") for a
    contribution that was never shown: one that was made anew must not pass for the one that was lost. step: of the run, as far as it knows."""

    cluster: str
    incarnation: str
    applied: int
    base: str
    prepared: ReadyRecord | None = None
    attempt: Attempt | None = None
    held: frozenset[tuple[int, str]] = frozenset()
    exposed: tuple[int, str] = (0, "")
    step: int = 0

    def is_in(self, number: int, participants: tuple[Participant, ...]) -> bool:
        """Whether what it had prepared is in a round of these participants, shown by this process or by the one before."""
        shown = {self.incarnation} | ({self.exposed[1]} if self.exposed[0] == number else set())
        return any(p.cluster == self.cluster and p.incarnation in shown for p in participants)


@dataclass(frozen=True, slots=True)
class Create:
    """Write the fragment's first record, if there is none."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class Propose:
    """Replace the round's record by compare-and-set on `revision`."""

    record: RoundRecord
    revision: int


@dataclass(frozen=True, slots=True)
class WriteReady:
    record: ReadyRecord


@dataclass(frozen=True, slots=True)
class WriteDone:
    record: DoneRecord


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin this attempt; an earlier one of the same fragment is over."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class Cease:
    """Stop the exchange that is under way: the round goes on without this cluster."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the held average of this round: the record says that it is committed. contributed: with this cluster's contribution."""

    round: int
    digest: str
    contributed: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the committed average of this round from those who hold it."""

    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The cluster missed rounds: get the averages it lacks, or the global parameters, of round `round` or later from others."""

    round: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The cluster's global parameters are not those that the others hold after round `round` (a memory or a disk failed): get them anew,
    those of digest `base` or of a later round."""

    round: int
    base: str


Action = Create | Propose | WriteReady | WriteDone | Begin | Cease | Apply | Fetch | CatchUp | Renew


def decide(view: View, local: Local, rules: Rules, *, may_propose: bool = True) -> list[Action]:
    """What the cluster should do now, in this order. Empty: nothing until something changes or time passes."""
    if view.round is None:
        first = first_round(view.fragment, local.base, local.applied, step=local.step)
        return [Create(first)] if may_propose and _may_restore(view, local) else []
    record = view.round.record
    if record.open > local.applied + 1:
        return _behind(view, record, local)
    if record.open < local.applied + 1:
        # Either an older record still stands here, and this is refused; or the store has lost what it had said, and the run goes on
        # from what was applied. The attempt's number is one that nobody has used.
        lost = first_round(view.fragment, local.base, local.applied, view.round.revision, local.step)
        return [Propose(lost, view.round.revision)] if may_propose and view.round.revision and _may_restore(view, local) else []
    actions = _train_or_exchange(view, record, local)
    successor = next_round(view, rules) if may_propose else None
    if successor is not None:
        actions.append(Propose(successor, view.round.revision))
    return actions


def _may_restore(view: View, local: Local) -> bool:
    """Whether a store that has lost what it held may be told to go on from where this cluster stands: others must be able to come there."""
    me = view.members.get(local.cluster)
    return not local.applied or (me is not None and me.record.address is not None)


def _behind(view: View, record: RoundRecord, local: Local) -> list[Action]:
    """The store shows a round committed that this cluster has not applied."""
    committed = record.phase is Phase.COMMITTED
    digest = record.digest if committed else record.previous
    if record.open != local.applied + 2 or digest is None:
        return [CatchUp(record.open - 1)]
    number = local.applied + 1
    if (number, digest) in local.held:
        return [Apply(number, digest, local.is_in(number, record.participants if committed else record.before))]
    attempt, owners = local.attempt, {part.owner for part in record.parts}
    if attempt is None or attempt.digest is not None:
        return [Fetch(number, digest)]
    mine = committed and attempt.round == number and attempt.attempt == record.attempt
    owners_live = all(view.alive(p.cluster, p.incarnation) for p in record.participants if p.cluster in owners)
    if mine and owners_live and not attempt.blamed:
        return []  # its own exchange is about to end with just that average
    return [Cease(), Fetch(number, digest)]


def _train_or_exchange(view: View, record: RoundRecord, local: Local) -> list[Action]:
    actions: list[Action] = []
    if record.phase is not Phase.COMMITTED and record.base is not None and record.base != local.base:
        actions.append(Renew(record.open - 1, record.base))
    prepared = local.prepared if local.prepared is not None and local.prepared.round == record.open else None
    mine = record.phase is Phase.EXCHANGE and record.takes(local.cluster, local.incarnation)
    if mine and prepared is not None and record.base == local.base:
        attempt = local.attempt
        if attempt is None or (attempt.round, attempt.attempt) != (record.number, record.attempt):
            return [Begin(record)]
        done = DoneRecord(record.number, record.attempt, local.incarnation, attempt.digest, attempt.blamed)
        if _differs(view.done.get(local.cluster), done) and (done.digest or done.blamed):
            actions.append(WriteDone(done))
    elif local.attempt is not None and local.attempt.round == record.open and local.attempt.digest is None:
        actions.append(Cease())
    if prepared is not None and not mine and _differs(view.ready.get(local.cluster), prepared):
        actions.append(WriteReady(prepared))
    return actions


def _differs(seen: object, record: object) -> bool:
    return seen is None or seen.record != record  # type: ignore[attr-defined]


def after_applying(prepared: ReadyRecord | None, applied: int, base: str) -> ReadyRecord | None:
    """A frozen contribution that was not in the round just applied: it stands for the next one, measured from the new parameters."""
    if prepared is None or prepared.round > applied:
        return prepared
    return replace(prepared, round=applied + 1, base=base)


def given_up(prepared: ReadyRecord | None, exposed: int) -> bool:
    """Whether a frozen contribution is lost when rounds are skipped. exposed: the last round in whose exchange this cluster took part.

    One that was exposed may be in an average that this cluster has not seen apart: it must never be counted twice."""
    return prepared is not None and prepared.round <= exposed
