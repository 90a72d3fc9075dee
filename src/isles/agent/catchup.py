"""Coming late, or back after missed rounds: the averages that were missed, or else the whole state, from the others.

A cluster that missed few rounds applies them as any late cluster does, and its workers lose nothing. One that holds nothing, or missed more
than the others keep, takes their newest checkpoint and the rounds since; its workers begin from that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from isles.errors import CheckpointError, NetworkError
from isles.exchange.joining import fetch_checkpoint, fetch_rounds
from isles.exchange.partial import Partial
from isles.exchange.state import TENSORS, Offer
from isles.protocol import Phase, RoundRecord, given_up

if TYPE_CHECKING:
    from isles.agent.agent import Agent

log = logging.getLogger("isles.agent")

HEADER = 1 << 16  # bytes of a file of tensors beside the values


def offers_of(agent: Agent) -> list[tuple[Offer, Path]]:
    """The checkpoints of this cluster, oldest first, for others."""
    if agent.own_beginning and not agent.membership.in_step():
        return []  # what this cluster began with may not be what the run did
    store, offers = agent.restored.checkpoints, []
    for step in store.steps():
        try:
            record = store.describe(step)
        except CheckpointError:
            continue
        file = record.files[TENSORS]
        applied = tuple(int(n) for n in record.state["applied"])
        offer = Offer(step, applied, int(file["bytes"]), str(file["blake3"]))
        offers.append((offer, store.path(step) / TENSORS))
    return offers


def rounds_of(agent: Agent, fragment: int) -> list[tuple[int, str]]:
    """The applied rounds whose averages this cluster keeps, for others."""
    if not 0 <= fragment < len(agent.journal.fragments):
        return []
    kept = set(agent.exchange.averages.held(fragment))
    return [(a.number, a.digest) for a in agent.journal.fragments[fragment].applied if (a.number, a.digest) in kept]


def reachable(agent: Agent) -> dict[str, str]:
    """Other members with an address that give a sign of life."""
    view = agent.board.view(0, time.monotonic())
    return {
        name: seen.record.address
        for name, seen in agent.board.members.items()
        if name != agent.invite.cluster and seen.record.address and view.alive(name)
    }


async def catch_up(agent: Agent, index: int, *, renew: bool = False) -> None:
    """Bring a fragment up to the newest round, or all of them by a checkpoint (renew: by that only). Raises NetworkError when nobody can give what is missing."""
    peers = reachable(agent)
    if not peers:
        over = all(agent.rules.over(seen.record) for seen in agent.board.rounds.values())
        what = "the run is over, and no cluster that holds its result" if over else "no other cluster"
        raise NetworkError(f"{what} can be reached to catch up from; waiting for one")
    if renew or agent.own_beginning or not await _by_rounds(agent, index, peers):
        await _by_checkpoint(agent, peers)
    elif agent.membership.in_step():
        Partial(joining(agent)).forget()  # of a transfer that was cut and is needed no more


def joining(agent: Agent) -> Path:
    return agent.folder.path / "joining.safetensors"


async def _by_rounds(agent: Agent, index: int, peers: dict[str, str]) -> bool:
    driver = agent.drivers[index]
    target = agent.board.rounds[index].record.open - 1
    known = await fetch_rounds(agent.exchange, index, peers)
    known |= _recorded(agent.board.rounds[index].record)
    wanted = range(driver.applied + 1, target + 1)
    if not all(number in known for number in wanted):
        return False
    if given_up(driver.prepared, agent.journal.fragments[index].exposed):
        await agent.begin_anew("a contribution of ours may be in a round that was missed")
        driver.prepared = None
    start, stop = agent.state.layout.fragments[index]
    for number in wanted:
        await agent.exchange.fetch_result(
            index, number, known[number], start=start, size=stop - start, peers=peers, weights=None
        )
        await driver.apply(number, known[number], contributed=False)
    log.info("fragment %d: caught up to round %d", index, target)
    return True


def _recorded(record: RoundRecord) -> dict[int, str]:
    """The rounds of which the store's record itself says what was committed."""
    rounds = {record.number - 1: record.previous}
    if record.phase is Phase.COMMITTED:
        rounds[record.number] = record.digest
    return {number: digest for number, digest in rounds.items() if digest}


async def _by_checkpoint(agent: Agent, peers: dict[str, str]) -> None:
    path = joining(agent)
    rounds = [seen.record.open - 1 for _, seen in sorted(agent.board.rounds.items())]
    most = 2 * 4 * agent.state.layout.total + HEADER  # global parameters and momentum, fp32
    offer = await fetch_checkpoint(agent.exchange, peers, path, rounds=rounds, size=most)
    if any(new < old.applied for new, old in zip(offer.applied, agent.state.fragments, strict=True)):
        Partial(path).forget()
        raise NetworkError("the others' newest checkpoint is older than what this cluster holds; waiting for their next")
    await agent.begin_anew("the cluster takes over the state of the others")
    async with agent.lock:
        tensors = await asyncio.to_thread(load_file, path)
        await asyncio.to_thread(agent.state.load, tensors, list(offer.applied))
        agent.state.drop_residual()
        for index, driver in enumerate(agent.drivers):
            agent.journal.fragments[index].applied = []
            driver.prepared = None  # what was handed off is in the shared file, measured from parameters that are gone
        agent.own_beginning = False
        agent.status["step"] = max(int(agent.status["step"]), offer.step)
        await agent.checkpoint()
    Partial(path).forget()
    log.info("took over the state of step %d, rounds %s", offer.step, list(offer.applied))
