"""How a cluster that comes late gets a run's state from the others.

Global parameters and momentum have the same bits on every cluster, so a checkpoint of the same rounds is the same file everywhere: a joiner
takes its chunks from several clusters at once, checks each against the hash that most givers name for it and the whole against what most say;
one giver whose disk altered its file costs the others nothing. What has come stays on disk when the transfer is cut, and the next try goes
on from there, for as long as somebody keeps that checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from isles.errors import MALFORMED, CheckpointError, NetworkError, first_failure
from isles.exchange.exchange import Exchange
from isles.exchange.partial import Partial, hash_at
from isles.exchange.peers import ERRORS, Answer, Pause, TooEarly
from isles.exchange.spool import chunk_digest
from isles.exchange.state import CHUNK, HASH, Offer

log = logging.getLogger("isles.exchange")

MAX_JSON = 1 << 20
TRIES = 6  # of a chunk with one giver in a row, over some seconds
NOTED = 64  # chunks after which it is noted which have come
LOOK = 1.0  # seconds between two looks at whether a giver still moves
HASHING, READING = 60.0, 1e8  # seconds, and bytes/s beside, in which a giver has to read its file


async def _ask(exchange: Exchange, peer: str, address: str, path: str, limit: int) -> Answer:
    """GET once, given up when the peer moves no byte for long: joining waits for nobody. Raises one of ERRORS, or TooEarly."""
    began = time.monotonic()
    asking = asyncio.ensure_future(exchange.peers.get_once(peer, address, f"/v1/{exchange.run}/{path}", limit, "state"))
    try:
        while not (await asyncio.wait({asking}, timeout=LOOK))[0]:
            if exchange.peers.health(peer).stuck(began):
                raise TimeoutError("it has not moved a byte for long")
        return asking.result()
    finally:
        asking.cancel()


async def fetch_rounds(exchange: Exchange, fragment: int, peers: Mapping[str, str]) -> dict[int, str]:
    """The rounds of a fragment that others keep, each with the digest that most of them name."""
    named: dict[int, Counter[str]] = {}
    for name, address in peers.items():
        try:
            answer = await _ask(exchange, name, address, f"{fragment}/rounds", MAX_JSON)
            rows = {int(number): str(digest) for number, digest in json.loads(answer.body)}
        except (*ERRORS, TooEarly, *MALFORMED):
            continue
        for number, digest in rows.items():
            named.setdefault(number, Counter())[digest] += 1
    return {number: digests.most_common(1)[0][0] for number, digests in named.items()}


async def fetch_checkpoint(
    exchange: Exchange, peers: Mapping[str, str], path: Path, *, rounds: Sequence[int], size: int
) -> Offer:
    """Get a checkpoint that others hold into a file: the one that an earlier call was cut in, if somebody keeps it, or else the newest.

    rounds: the last that is committed of each fragment, size: bytes that a state can have at most; who offers more is not believed. Raises
    NetworkError, DiskError."""
    offers: dict[str, list[Offer]] = {}
    for name, address in peers.items():
        try:
            answer = await _ask(exchange, name, address, "checkpoints", MAX_JSON)
            offers[name] = [Offer.of(raw) for raw in json.loads(answer.body)]
        except (*ERRORS, TooEarly, CheckpointError, *MALFORMED):
            continue
    sound = [
        (name, offer)
        for name, many in offers.items()
        for offer in many
        if len(offer.applied) == len(rounds) and all(map(int.__le__, offer.applied, rounds)) and offer.size <= size
    ]
    if not sound:
        raise NetworkError("no cluster that can be reached has a checkpoint to join from; trying again")
    partial = Partial(path)
    digest = partial.digest
    if all(offer.digest != digest for _, offer in sound):
        newest = max(offer.applied for _, offer in sound)
        digest = Counter(o.digest for _, o in sound if o.applied == newest).most_common(1)[0][0]
    givers = {name: (peers[name], offer.step) for name, offer in sound if offer.digest == digest}
    offer = next(offer for _, offer in sound if offer.digest == digest)
    partial.begin(offer)
    givers, hashes = await _agreed(exchange, givers, offer, partial)
    log.info(
        "joining from the checkpoint of step %d, %.1f MB from %s%s", offer.step, offer.size / 1e6, ", ".join(givers),
        f", of which {len(partial.held) * CHUNK / 1e6:.1f} MB have come before" if partial.held else "",
    )  # fmt: skip
    await _fetch(exchange, givers, offer, hashes, partial)
    return offer


async def _hashes_from(exchange: Exchange, peer: str, address: str, step: int, offer: Offer) -> bytes:
    """What a giver names as the hashes of its chunks, once it has read its file; empty when it does not."""
    size, until = -(-offer.size // CHUNK) * HASH, time.monotonic() + HASHING + offer.size / READING
    try:
        while time.monotonic() < until:
            answer = await _ask(exchange, peer, address, f"checkpoints/{step}/hashes", size)
            if answer.status == 200:
                return answer.body if len(answer.body) == size else b""
            await asyncio.sleep(LOOK)
    except (*ERRORS, TooEarly) as error:
        exchange.peers.failed(peer, address, error)
    return b""


async def _agreed(
    exchange: Exchange, givers: Mapping[str, tuple[str, int]], offer: Offer, partial: Partial
) -> tuple[dict[str, tuple[str, int]], bytes]:
    """The givers that name the same hashes of chunks, as most of them do, and those hashes. Raises NetworkError, DiskError."""
    answers = await asyncio.gather(*(_hashes_from(exchange, name, *giver, offer) for name, giver in givers.items()))
    named = {name: body for name, body in zip(givers, answers, strict=True) if body}
    believed = {name: body for name, body in named.items() if chunk_digest(body).hex() not in partial.wrong}
    if not believed:
        partial.wrong.clear()  # a giver may have mended its disk
        partial.note()
        raise NetworkError("no cluster that can be reached gives a whole checkpoint to join from; trying again")
    hashes = Counter(believed.values()).most_common(1)[0][0]
    for name, body in named.items():
        if body != hashes:
            log.warning("%s has another file of that checkpoint than others do, so nothing is taken from it", name)
    return {name: giver for name, giver in givers.items() if named.get(name) == hashes}, hashes


async def _fetch(
    exchange: Exchange, givers: Mapping[str, tuple[str, int]], offer: Offer, hashes: bytes, partial: Partial
) -> None:
    count = -(-offer.size // CHUNK)
    queue = deque(chunk for chunk in range(count) if chunk not in partial.held)
    file = partial.open()
    try:
        with first_failure():
            async with asyncio.TaskGroup() as group:
                for name, (address, step) in givers.items():
                    group.create_task(_fetch_from(exchange, name, address, step, queue, offer, hashes, file, partial))
    finally:
        os.close(file)
        if partial.held:
            partial.note()
    if len(partial.held) < count:
        raise NetworkError("the clusters that gave the checkpoint went away; going on when one is back")
    actual = await asyncio.to_thread(lambda: blake3(max_threads=1).update_mmap(partial.path).hexdigest())
    if actual != offer.digest:
        await _sort_out(hashes, partial)


async def _sort_out(hashes: bytes, partial: Partial) -> None:
    """The whole does not match its hash: chunks that this disk lost come again, or else their hashes were no good. Raises NetworkError."""
    if damaged := await asyncio.to_thread(partial.damaged, hashes):
        partial.held -= damaged
        partial.note()
        raise NetworkError(f"{len(damaged)} chunks of the checkpoint that came are damaged on this disk; getting those again")
    partial.forget()
    partial.wrong.append(chunk_digest(hashes).hex())
    partial.note()
    raise NetworkError("the checkpoint that came from the others does not match its hash; trying others")


async def _fetch_from(
    exchange: Exchange, peer: str, address: str, step: int, queue: deque[int], offer: Offer, hashes: bytes, file: int,
    partial: Partial,
) -> None:  # fmt: skip
    """Take chunks from one giver until all have come, or it fails again and again; what it did not give goes back to the others."""
    failures, pause, count = 0, Pause(), len(hashes) // HASH
    while len(partial.held) < count and failures < TRIES:
        if not queue:  # what others are at may come back
            await asyncio.sleep(LOOK / 10)
            continue
        chunk = queue.popleft()
        size, body = min(CHUNK, offer.size - chunk * CHUNK), b""
        try:
            answer = await _ask(exchange, peer, address, f"checkpoints/{step}/{chunk}", size)
            if len(answer.body) == size and chunk_digest(answer.body) == hash_at(hashes, chunk):
                body = answer.body
            else:
                log.warning("%s at %s sent a damaged chunk of its checkpoint", peer, address)
        except (*ERRORS, TooEarly) as error:
            exchange.peers.failed(peer, address, error)
        finally:
            if not body:
                queue.append(chunk)
        if not body:
            failures += 1
            await pause.wait()
            continue
        failures, pause = 0, Pause()
        await asyncio.to_thread(partial.write, file, chunk, body)
        partial.held.add(chunk)
        if len(partial.held) % NOTED == 0:
            partial.note()
