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
from isles.exchange.state import Offer, fetch_checkpoint, fetch_rounds

if TYPE_CHECKING:
    from isles.agent.agent import Agent

log = logging.getLogger("isles.agent")


def offer_of(agent: Agent) -> tuple[Offer, Path] | None:
    """The newest checkpoint of this cluster, for others."""
    store = agent.restored.checkpoints
    steps = store.steps()
    if not steps or (agent.own_beginning and not agent.membership.in_step()):
        return None  # what this cluster began with may not be what the run did
    try:
        record = store.describe(steps[-1])
    except CheckpointError:
        return None
    file = record.files["global.safetensors"]
    applied = tuple(int(n) for n in record.state["applied"])
    return Offer(steps[-1], applied, int(file["bytes"]), str(file["blake3"])), store.path(steps[-1]) / "global.safetensors"


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


async def _by_rounds(agent: Agent, index: int, peers: dict[str, str]) -> bool:
    driver = agent.drivers[index]
    target = agent.board.rounds[index].record.open - 1
    known = await fetch_rounds(agent.exchange, index, peers)
    wanted = range(driver.applied + 1, target + 1)
    if not all(number in known for number in wanted):
        return False
    exposed = agent.journal.fragments[index].exposed
    if driver.prepared is not None and driver.prepared.round <= exposed:
        await agent.begin_anew("a contribution of ours may be in a round that was missed")
        driver.prepared = None
    start, stop = agent.state.layout.fragments[index]
    for number in wanted:
        if agent.restored.codec.gathers:
            return False  # the weights of a bundle are in its round's record, which is gone
        await agent.exchange.fetch_result(index, number, known[number], start=start, size=stop - start, peers=peers)
        await driver.apply(number, known[number], contributed=False)
    log.info("fragment %d: caught up to round %d", index, target)
    return True


async def _by_checkpoint(agent: Agent, peers: dict[str, str]) -> None:
    path = agent.folder.path / "joining.safetensors"
    offer = await fetch_checkpoint(agent.exchange, peers, path)
    if any(new < old.applied for new, old in zip(offer.applied, agent.state.fragments, strict=True)):
        raise NetworkError("the others' newest checkpoint is older than what this cluster holds; waiting for their next")
    await agent.begin_anew("the cluster takes over the state of the others")
    async with agent.lock:
        tensors = await asyncio.to_thread(load_file, path)
        await asyncio.to_thread(agent.state.load, tensors, list(offer.applied))
        for index, driver in enumerate(agent.drivers):
            agent.journal.fragments[index].applied = []
            driver.prepared = None  # what was handed off is in the shared file, measured from parameters that are gone
        agent.own_beginning = False
        agent.status["step"] = max(int(agent.status["step"]), offer.step)
        await agent.checkpoint()
    path.unlink(missing_ok=True)
    log.info("took over the state of step %d, rounds %s", offer.step, list(offer.applied))
