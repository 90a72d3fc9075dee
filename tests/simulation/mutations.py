"""Planted bugs: what the simulation must find, so that its silence about the real protocol means something.

Each mutation breaks one rule of the protocol in place; `planted` puts the rule back. FOUND_BY names a seed that catches each (the
first one), so that the test of the test is quick; `python -m tests.simulation --mutations` looks for them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulation import cluster as simulated

from isles.protocol import Apply, Phase, ReadyRecord, Renew, RoundRecord, View, board, cluster, rounds

Patch = tuple[Any, str, Any]  # where, name, what to put there


def _apply_before_commit() -> list[Patch]:
    """A cluster applies an average as soon as it holds it, without waiting for the record."""
    real = simulated.decide

    def decide(view: View, local: cluster.Local, rules: rounds.Rules, **more: Any) -> list[Any]:
        attempt = local.attempt
        if attempt is not None and attempt.digest is not None and attempt.round == local.applied + 1:
            return [Apply(attempt.round, attempt.digest, True)]
        return real(view, local, rules, **more)

    return [(simulated, "decide", decide)]


def _commit_by_one() -> list[Patch]:
    """A round is committed with whatever digest the first holder names, of any attempt."""

    def held(view: View, record: RoundRecord, participant: rounds.Participant) -> str | None:
        seen = view.done.get(participant.cluster)
        return seen.record.digest if seen is not None and seen.record.round == record.number else None

    return [(rounds, "_held", held)]


def _names_not_processes() -> list[Patch]:
    """A restarted cluster counts as the participant that it was."""
    real = board.View.alive
    return [(board.View, "alive", lambda self, name, incarnation=None: real(self, name))]  # noqa: ARG005


def _nobody_is_ever_lost() -> list[Patch]:
    """An exchange waits for its participants for ever."""
    real = rounds._after_exchange

    def after_exchange(view: View, record: RoundRecord) -> RoundRecord | None:
        successor = real(view, record)
        return successor if successor is not None and successor.phase is Phase.COMMITTED else None

    return [(rounds, "_after_exchange", after_exchange)]


def _exposed_and_kept() -> list[Patch]:
    """A cluster that skipped rounds contributes again what may have been averaged already."""
    return [(simulated, "given_up", lambda prepared, exposed: False)]  # noqa: ARG005


def _late_progress_lost() -> list[Patch]:
    """A cluster that was not in a round throws away what it had prepared."""
    return [(simulated, "after_applying", lambda prepared, applied, base: None)]  # noqa: ARG005


def _no_compare_and_set() -> list[Patch]:
    """Records are written without looking at what stands."""
    real = simulated.SimCluster._write

    def write(self: Any, x: Any, key: str, value: bytes, expected: int | None) -> None:  # noqa: ARG001
        real(self, x, key, value, None)

    return [(simulated.SimCluster, "_write", write)]


def _joiner_takes_part() -> list[Patch]:
    """A cluster counts as ready for whatever round is open, whether or not it holds that round's parameters."""

    def candidates(view: View, record: RoundRecord) -> dict[str, ReadyRecord]:
        return {n: s.record for n, s in view.ready.items() if view.alive(n, s.record.incarnation)} if record else {}

    return [(rounds, "_candidates", candidates)]


def _most_must_hold() -> list[Patch]:
    """An average is committed only once most hold it, however long the others have made no progress."""
    return [(rounds, "_held_long", lambda view, holders: False)]  # noqa: ARG005


def _out_of_reach() -> list[Patch]:
    """A cluster that cannot be reached goes on by itself, and nobody else ever gets what it did."""
    real = rounds._owners

    def owners(view: View, participants: Iterable[str]) -> dict[str, float]:
        names = list(participants)
        return real(view, names) or (dict.fromkeys(names, 0.0) if len(names) == 1 else {})

    return [(rounds, "_owners", owners)]


def _hands_that_do_not_take() -> list[Patch]:
    """An average that only clusters out of reach hold is waited for until one that can be reached holds it too."""
    real = rounds._hung

    def hung(view: View, record: RoundRecord, survivors: int, holders: dict[str, str]) -> bool:
        return not holders and real(view, record, survivors, holders)

    return [(rounds, "_hung", hung)]


def _astray_for_good() -> list[Patch]:
    """A cluster with other parameters is left out, and never told to get them anew."""
    real = simulated.decide

    def decide(view: View, local: cluster.Local, rules: rounds.Rules, **more: Any) -> list[Any]:
        return [action for action in real(view, local, rules, **more) if not isinstance(action, Renew)]

    return [(simulated, "decide", decide)]


def _alone_and_hung() -> list[Patch]:
    """An exchange with one participant left, whom nobody can blame, is waited for for ever."""
    real = rounds._hung

    def hung(view: View, record: RoundRecord, survivors: int, holders: dict[str, str]) -> bool:
        return bool(holders) and real(view, record, survivors, holders)

    return [(rounds, "_hung", hung)]


def _the_wrong_one_stays() -> list[Patch]:
    """Of two results of one attempt nobody is held to be wrong: it is made again by all."""
    return [(rounds, "_without_the_wrong", lambda view, record, survivors, holders: rounds._retry(view, record, survivors))]  # noqa: ARG005


def _loss_is_not_mended() -> list[Patch]:
    """Who is ahead of a store that has lost writes waits for it."""
    real = simulated.decide

    def decide(view: View, local: cluster.Local, rules: rounds.Rules, **more: Any) -> list[Any]:
        behind = view.round is not None and view.round.record.open < local.applied + 1
        return [] if behind else real(view, local, rules, **more)

    return [(simulated, "decide", decide)]


def _revisions_outlive_the_store() -> list[Patch]:
    """What was read before the store fell is newer than what it says since, if it had counted further."""
    real = board.Board.connected

    def connected(self: board.Board, now: float) -> None:
        revisions = [(seen, seen.revision) for seen in self._all()]
        real(self, now)
        for seen, revision in revisions:
            seen.revision = revision

    return [(board.Board, "connected", connected)]


def _earlier_process_forgotten() -> list[Patch]:
    """A cluster does not count as landed what it had shown before it was restarted."""

    def is_in(self: cluster.Local, number: int, participants: tuple[rounds.Participant, ...]) -> bool:  # noqa: ARG001
        return any((p.cluster, p.incarnation) == (self.cluster, self.incarnation) for p in participants)

    return [(cluster.Local, "is_in", is_in)]


MUTATIONS: dict[str, Callable[[], list[Patch]]] = {
    "apply before commit": _apply_before_commit,
    "commit by the first holder, of any attempt": _commit_by_one,
    "names instead of processes": _names_not_processes,
    "nobody is ever lost": _nobody_is_ever_lost,
    "exposed contributions are kept": _exposed_and_kept,
    "late progress is thrown away": _late_progress_lost,
    "no compare-and-set": _no_compare_and_set,
    "a joiner takes part before it holds the state": _joiner_takes_part,
    "most must hold an average, however long": _most_must_hold,
    "who cannot be reached goes on alone": _out_of_reach,
    "who can be reached and takes no average is waited for": _hands_that_do_not_take,
    "other parameters are never renewed": _astray_for_good,
    "one that hangs alone is waited for": _alone_and_hung,
    "whom most contradict stays": _the_wrong_one_stays,
    "a store's loss is not mended": _loss_is_not_mended,
    "revisions outlive the store's loss": _revisions_outlive_the_store,
    "what a process before had shown is forgotten": _earlier_process_forgotten,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The protocol with one bug in it, in this process, meanwhile."""
    patches = [(where, what, new, getattr(where, what)) for where, what, new in MUTATIONS[name]()]
    try:
        for where, what, new, _ in patches:
            setattr(where, what, new)
        yield
    finally:
        for where, what, _, old in patches:
            setattr(where, what, old)
