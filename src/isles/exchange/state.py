"""The state of a run for who comes late: which averages a cluster keeps, and its newest checkpoint, chunk by chunk.

    GET /v1/RUN/FRAGMENT/rounds             the rounds whose averages are kept here (JSON: [[round, digest], ...])
    GET /v1/RUN/checkpoint                  the newest checkpoint: step, rounds, and size and hash of its file (JSON)
    GET /v1/RUN/checkpoint/STEP/CHUNK       a chunk of that file

Global parameters and momentum have the same bits on every cluster, so a checkpoint of the same rounds is the same file everywhere: a joiner
takes its chunks from several clusters at once, checks each against the hash that came with it and the whole against what most say.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from blake3 import blake3

from isles.errors import CheckpointError, DiskError, NetworkError
from isles.exchange.exchange import Exchange
from isles.exchange.peers import ERRORS, TooEarly
from isles.exchange.server import Refused, Server
from isles.exchange.spool import chunk_digest

log = logging.getLogger("isles.exchange")

CHUNK = 4 << 20  # bytes
MAX_JSON = 1 << 20
MAX_STATE = 1 << 42  # bytes: 4 TiB, ten times the state of 50 billion parameters


@dataclass(frozen=True)
class Offer:
    """A checkpoint that a cluster gives to others. applied: the rounds that are in it. size, digest: of its file of tensors."""

    step: int
    applied: tuple[int, ...]
    size: int
    digest: str

    @classmethod
    def parse(cls, data: bytes) -> Offer:
        """Raises CheckpointError."""
        try:
            raw: Any = json.loads(data)
            offer = cls(int(raw["step"]), tuple(int(n) for n in raw["applied"]), int(raw["size"]), str(raw["digest"]))
            if not 0 < offer.size <= MAX_STATE or len(offer.digest) != 64 or offer.step < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("another cluster's description of its checkpoint is damaged") from error
        return offer


class StateServer:
    """Adds the routes above to an exchange's server. rounds: the applied rounds of a fragment whose averages are kept; checkpoint: the
    newest one and its file."""

    def __init__(
        self, server: Server, rounds: Callable[[int], list[tuple[int, str]]], checkpoint: Callable[[], tuple[Offer, Path] | None]
    ) -> None:  # fmt: skip
        self._server, self._rounds, self._checkpoint = server, rounds, checkpoint
        server.routes += [
            web.get(r"/v1/{run}/{fragment:\d+}/rounds", self._answer_rounds),
            web.get(r"/v1/{run}/checkpoint", self._answer_offer),
            web.get(r"/v1/{run}/checkpoint/{step:\d+}/{chunk:\d+}", self._answer_chunk),
        ]

    async def _answer_rounds(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        return web.json_response(self._rounds(int(request.match_info["fragment"][:9])))

    async def _answer_offer(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        found = self._checkpoint()
        if found is None:
            raise Refused(404, "there is no checkpoint here yet")
        return web.json_response(asdict(found[0]))

    async def _answer_chunk(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        found, chunk = self._checkpoint(), int(request.match_info["chunk"][:9])
        if found is None or found[0].step != int(request.match_info["step"][:18]) or chunk * CHUNK >= found[0].size:
            raise Refused(410, "this checkpoint is not kept any more")
        body = await asyncio.to_thread(_read_chunk, found[1], chunk)
        self._server.counters.up["state"] += len(body)
        return await self._server.send(request, body, chunk_digest(body))


def _read_chunk(path: Path, chunk: int) -> bytes:
    with path.open("rb") as file:
        file.seek(chunk * CHUNK)
        return file.read(CHUNK)


async def fetch_rounds(exchange: Exchange, fragment: int, peers: Mapping[str, str]) -> dict[int, str]:
    """The rounds of a fragment that others keep, each with the digest that most of them name."""
    named: dict[int, Counter[str]] = {}
    for name, address in peers.items():
        try:
            answer = await exchange.peers.get_once(name, address, f"/v1/{exchange.run}/{fragment}/rounds", MAX_JSON, "state")
            for number, digest in json.loads(answer.body):
                named.setdefault(int(number), Counter())[str(digest)] += 1
        except (*ERRORS, TooEarly, ValueError, TypeError):
            continue
    return {number: digests.most_common(1)[0][0] for number, digests in named.items()}


async def fetch_checkpoint(exchange: Exchange, peers: Mapping[str, str], path: Path) -> Offer:
    """Get the newest checkpoint that others hold into a file. Raises NetworkError, DiskError."""
    offers: dict[str, Offer] = {}
    for name, address in peers.items():
        try:
            answer = await exchange.peers.get_once(name, address, f"/v1/{exchange.run}/checkpoint", MAX_JSON, "state")
            offers[name] = Offer.parse(answer.body)
        except (*ERRORS, TooEarly, CheckpointError):
            continue
    if not offers:
        raise NetworkError("no cluster that can be reached has a checkpoint to join from; trying again")
    newest = max(offer.applied for offer in offers.values())
    digest = Counter(o.digest for o in offers.values() if o.applied == newest).most_common(1)[0][0]
    givers = {name: offer for name, offer in offers.items() if offer.digest == digest}
    offer = next(iter(givers.values()))
    log.info("joining from the checkpoint of step %d, %.1f MB from %s", offer.step, offer.size / 1e6, ", ".join(givers))
    await _fetch(exchange, {name: (peers[name], o.step) for name, o in givers.items()}, offer, path)
    return offer


async def _fetch(exchange: Exchange, givers: Mapping[str, tuple[str, int]], offer: Offer, path: Path) -> None:
    count, held = -(-offer.size // CHUNK), set[int]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror}); free some space") from error
    try:
        queue = iter(range(count))
        async with asyncio.TaskGroup() as group:
            for name, (address, step) in givers.items():
                group.create_task(_fetch_from(exchange, name, address, step, queue, offer, file, held))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        os.close(file)
    if len(held) < count:
        raise NetworkError("the clusters that gave the checkpoint went away; trying again")
    actual = await asyncio.to_thread(lambda: blake3(max_threads=1).update_mmap(path).hexdigest())
    if actual != offer.digest:
        raise NetworkError("the checkpoint that came from the others does not match its hash; trying again")


async def _fetch_from(
    exchange: Exchange, peer: str, address: str, step: int, chunks: Iterator[int], offer: Offer, file: int, held: set[int]
) -> None:  # fmt: skip
    for chunk in chunks:
        size = min(CHUNK, offer.size - chunk * CHUNK)
        try:
            answer = await exchange.peers.get_once(
                peer, address, f"/v1/{exchange.run}/checkpoint/{step}/{chunk}", size, "state"
            )
        except (*ERRORS, TooEarly) as error:
            log.warning("%s at %s: %s", peer, address, error)
            return
        if len(answer.body) != size or chunk_digest(answer.body).hex() != answer.digest:
            log.warning("%s at %s sent a damaged chunk of its checkpoint", peer, address)
            return
        try:
            await asyncio.to_thread(os.pwrite, file, answer.body, chunk * CHUNK)
        except OSError as error:
            raise DiskError(f"the checkpoint of the others cannot be written ({error.strerror}); free some space") from error
        held.add(chunk)
