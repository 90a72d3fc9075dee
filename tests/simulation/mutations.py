"""Planted bugs: what the simulation must find, so that its silence about the real protocol means something.

Each mutation breaks one rule of the protocol in place; `planted` puts the rule back. FOUND_BY names a seed that catches each (the
first one), so that the test of the test is quick; `python -m tests.simulation --mutations` looks for them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.simulation import cluster as simulated

from isles.protocol import Apply, Phase, ReadyRecord, RoundRecord, View, board, cluster, rounds

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

    def after(prepared: ReadyRecord | None, exposed: int, applied: int, base: str) -> ReadyRecord | None:  # noqa: ARG001
        return None if prepared is None else replace(prepared, round=applied + 1, base=base)

    return [(simulated, "after_catching_up", after)]


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


MUTATIONS: dict[str, Callable[[], list[Patch]]] = {
    "apply before commit": _apply_before_commit,
    "commit by the first holder, of any attempt": _commit_by_one,
    "names instead of processes": _names_not_processes,
    "nobody is ever lost": _nobody_is_ever_lost,
    "exposed contributions are kept": _exposed_and_kept,
    "late progress is thrown away": _late_progress_lost,
    "no compare-and-set": _no_compare_and_set,
    "a joiner takes part before it holds the state": _joiner_takes_part,
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
