"""What a cluster tells the others of itself: that it lives, how it stands, and for people how it does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING

from isles.agent.catchup import reachable
from isles.errors import IslesError, NetworkError, UsageError
from isles.protocol import BEAT, FiguresRecord, MemberRecord, Phase, State, pack, parse

if TYPE_CHECKING:
    from isles.agent.agent import Agent

log = logging.getLogger("isles.agent")

HIDDEN = 600.0  # seconds for which a cluster that the others could not reach owns no part
ALONE = (
    "no cluster that can be reached from outside is there, and a round needs one: wait for it, or join without --outbound-only"
)
FIGURES = 5  # beats between two reports for people


class Membership:
    """The member's record of an agent. before: incarnation of this folder's agent before; trouble: what a person should know of, in a sentence."""

    def __init__(self, agent: Agent, before: str = "") -> None:
        self._agent, self._before = agent, before
        self._beats = 0
        self._hidden_since: float | None = None  # when the others said that they cannot reach this cluster
        self.trouble = ""

    async def claim_name(self) -> None:
        """See that no other process takes part under this cluster's name. Raises UsageError."""
        seen = await self._anothers()
        if seen is None:
            return
        await asyncio.sleep(2.5 * BEAT)
        if await self._anothers() not in (None, seen):
            raise UsageError(
                f"another machine, or another folder, takes part as {self._agent.invite.cluster} now; end that one with `isles leave`, or "
                "have the organiser invite this one under a name of its own"
            )

    async def _anothers(self) -> int | None:
        """The revision of this cluster's record, if a process wrote it that is not of this folder and has not left."""
        try:
            entry = await self._agent.store.get(f"members.{self._agent.invite.cluster}")
            record = None if entry is None else parse(MemberRecord, entry.value)
        except IslesError:  # it cannot be seen, or is damaged: the next refresh writes it anew
            return None
        if entry is None or record is None or record.state is State.LEAVING or record.incarnation == self._before:
            return None
        return entry.revision

    async def refresh(self) -> None:
        """Say how the cluster stands."""
        self._beats += 1
        self._judge_reach()
        address = None if self._agent.settings.outbound_only or self._hidden_since is not None else self._agent.address
        record = MemberRecord(
            self._agent.invite.cluster, self._agent.incarnation, self._agent.member, address, beat=self._beats, step=int(self._agent.status["step"]),
            rounds=tuple(f.applied for f in self._agent.state.fragments), up=self._up(), down=self._agent.exchange.speed.down.speed,
        )  # fmt: skip
        with contextlib.suppress(NetworkError):
            await self._agent.store.put(f"members.{self._agent.invite.cluster}", pack(record))
            if self._beats % FIGURES == 0 or self._agent.member is State.LEAVING:
                await self._agent.store.put(f"figures.{self._agent.invite.cluster}", pack(self._figures()))

    def _up(self) -> int:
        """Bytes/s that the cluster can send: as its line shows, no more than its host allows; 0 when neither is known."""
        known = [int(rate) for rate in (self._agent.exchange.speed.up.speed, self._agent.settings.max_upload) if rate]
        return min(known, default=0)

    def _judge_reach(self) -> None:
        """When most others could not get on with this cluster in a round, it owns no parts for a while, as if it could not be reached."""
        now, me = time.monotonic(), self._agent.invite.cluster
        if self._agent.settings.outbound_only:
            self._notice_being_alone()
            return
        if self._hidden_since is not None:
            if now - self._hidden_since > HIDDEN or not reachable(self._agent):
                self._hidden_since, self.trouble = None, ""
            return
        for index, seen in self._agent.board.rounds.items():
            others = {p.cluster for p in seen.record.participants if p.cluster != me}
            reports = [d.record for name, d in self._agent.board.done[index].items() if name in others]
            current = [r for r in reports if (r.round, r.attempt) == (seen.record.number, seen.record.attempt)]
            blaming = sum(me in r.blamed for r in current)
            if self._agent.address and blaming and 2 * blaming >= len(others) and reachable(self._agent):
                self._hidden_since = now
                self.trouble = f"{blaming} of {len(others)} others could not reach it at {self._agent.address}"
                log.error(
                    "%s; open that port, or join with --outbound-only; for %.0f minutes this cluster owns no part of a round",
                    self.trouble.replace("it at", "this cluster at"), HIDDEN / 60,
                )  # fmt: skip
                return

    def _notice_being_alone(self) -> None:
        """A cluster that cannot be reached makes no round without one that can."""
        alone = self._beats > 10 and not reachable(self._agent)
        if alone and not self.trouble:
            log.warning("%s", ALONE)
        self.trouble = ALONE if alone else ""

    def _figures(self) -> FiguresRecord:
        """How the cluster does, for people."""
        counters, loss = self._agent.exchange.counters.as_dict(), self._agent.status.get("loss")
        return FiguresRecord(
            self._agent.invite.cluster, loss if loss is not None and math.isfinite(loss) else None, int(self._agent.status["tokens"]),
            float(self._agent.status.get("trained_seconds", 0.0)), float(self._agent.status["stalled"]),
            tuple(round(d.exchange_seconds, 3) for d in self._agent.drivers), sum(counters["up"].values()), sum(counters["down"].values()),
            self.trouble[:500],
        )  # fmt: skip

    def in_step(self) -> bool:
        """Whether the cluster holds the state of every open round, as far as the store has been read."""
        seen = [self._agent.board.rounds.get(index) for index in range(len(self._agent.state.fragments))]
        if all(s is None for s in seen):
            return self._beats > 1  # nobody has begun: the first to come begin
        return all(
            s is not None
            and s.record.open == f.applied + 1
            and (s.record.phase is Phase.COMMITTED or s.record.base in (None, f.digest))
            for s, f in zip(seen, self._agent.state.fragments, strict=True)
        )

    def all_have_all(self) -> bool:
        """Whether every cluster that has not left holds the last rounds, those included that are silent now and may come back."""
        mine = tuple(f.applied for f in self._agent.state.fragments)
        others = [m.record for n, m in self._agent.board.members.items() if n != self._agent.invite.cluster]
        others = [m for m in others if m.state is not State.LEAVING]
        return all(len(m.rounds) == len(mine) and all(a >= b for a, b in zip(m.rounds, mine, strict=True)) for m in others)
