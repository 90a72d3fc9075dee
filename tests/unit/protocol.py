"""Builders for the protocol's tests: a board with clusters on it, in one line."""

from __future__ import annotations

from typing import Any

from isles.protocol import (
    Board,
    DoneRecord,
    MemberRecord,
    Participant,
    Phase,
    ReadyRecord,
    RoundRecord,
    Rules,
    State,
    View,
    next_round,
    pack,
)  # fmt: skip

BASE, OTHER, DIGEST = "b" * 64, "c" * 64, "d" * 64
RULES = Rules((100_000,), start=1)


def incarnation(cluster: str, boot: int = 1) -> str:
    return f"{ord(cluster[-1]):04x}{boot:04x}"


class Table:
    """A board under construction; `now` is its clock."""

    def __init__(self, *clusters: str) -> None:
        self.board, self.revision, self.now = Board(), 0, 0.0
        for cluster in clusters:
            self.member(cluster)

    def put(self, key: str, record: MemberRecord | ReadyRecord | DoneRecord | RoundRecord) -> None:
        self.revision += 1
        self.board.put(key, pack(record), self.revision, self.now)

    def member(
        self, cluster: str, state: State = State.ACTIVE, boot: int = 1, address: str | None = "h:1", **more: Any
    ) -> None:
        self.put(f"members.{cluster}", MemberRecord(cluster, incarnation(cluster, boot), state, address, **more))

    def refresh(self, *clusters: str) -> None:
        for cluster in clusters:
            record = self.board.members[cluster].record
            self.put(f"members.{cluster}", record)

    def ready(
        self, cluster: str, number: int = 1, base: str = BASE, boot: int = 1, seconds: float = 10.0, tokens: int = 5
    ) -> None:
        record = ReadyRecord(number, incarnation(cluster, boot), base, tokens=tokens, step=number * 10, seconds=seconds)
        self.put(f"ready.0.{cluster}", record)

    def done(
        self, cluster: str, number: int = 1, attempt: int = 0, digest: str | None = DIGEST, blamed: tuple[str, ...] = ()
    ) -> None:
        self.put(f"done.0.{cluster}", DoneRecord(number, attempt, incarnation(cluster), digest, blamed))

    def round(self, record: RoundRecord) -> RoundRecord:
        self.put("rounds.0", record)
        return record

    def exchange(self, *clusters: str, number: int = 1, rules: Rules = RULES) -> RoundRecord:
        """Everybody is ready, and the exchange has begun."""
        self.round(RoundRecord(0, number, Phase.TRAIN, base=BASE))
        for cluster in clusters:
            self.ready(cluster, number)
        record = self.next(rules)
        assert record is not None and [p.cluster for p in record.participants] == sorted(clusters)
        return self.round(record)

    def view(self) -> View:
        return self.board.view(0, self.now)

    def next(self, rules: Rules = RULES) -> RoundRecord | None:
        return next_round(self.view(), rules)


def names(record: RoundRecord | None) -> list[str]:
    return [] if record is None else [p.cluster for p in record.participants]


__all__ = ["BASE", "DIGEST", "OTHER", "RULES", "Participant", "Table", "incarnation", "names"]
