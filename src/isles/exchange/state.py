"""What a cluster gives to who comes late: which averages it keeps, and its checkpoints, chunk by chunk.

GET /v1/RUN/FRAGMENT/rounds             the rounds whose averages are kept here (JSON: [[round, digest], ...])
GET /v1/RUN/checkpoints                 the checkpoints kept, oldest first: step, rounds, and size and hash of the file of each (JSON)
GET /v1/RUN/checkpoints/STEP/hashes     the hashes of the chunks of such a file, 32 bytes each
GET /v1/RUN/checkpoints/STEP/CHUNK      a chunk of such a file
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from isles.errors import MALFORMED, CheckpointError
from isles.exchange.server import LONG_POLL, Refused, Server
from isles.exchange.spool import chunk_digest

CHUNK = 4 << 20  # bytes
HASH = 32  # bytes
TENSORS = "global.safetensors"  # of a checkpoint, with the same bits on every cluster
HOLD = 600.0  # seconds for which a checkpoint counts as wanted after a part of it was asked for
MAX_OFFERS = 64  # of one cluster
KEPT = 4  # lists of hashes


@dataclass(frozen=True)
class Offer:
    """A checkpoint that a cluster gives to others. applied: the rounds that are in it. size, digest: of its file of tensors."""

    step: int
    applied: tuple[int, ...]
    size: int
    digest: str

    @classmethod
    def of(cls, raw: Any) -> Offer:
        """Raises CheckpointError."""
        try:
            offer = cls(int(raw["step"]), tuple(int(n) for n in raw["applied"]), int(raw["size"]), str(raw["digest"]))
            if offer.size <= 0 or len(offer.digest) != 64 or offer.step < 0:
                raise ValueError
        except MALFORMED as error:
            raise CheckpointError("another cluster's description of its checkpoint is damaged") from error
        return offer


class StateServer:
    """Adds the routes above to an exchange's server. rounds: the applied rounds of a fragment whose averages are kept; checkpoints: those that
    are kept, oldest first, with their files."""

    def __init__(
        self, server: Server, rounds: Callable[[int], list[tuple[int, str]]], checkpoints: Callable[[], list[tuple[Offer, Path]]]
    ) -> None:  # fmt: skip
        self._server, self._rounds, self._checkpoints = server, rounds, checkpoints
        self._hashes: dict[str, asyncio.Task[bytes]] = {}  # by the digest of the file
        self._asked: dict[int, float] = {}  # when a part of the checkpoint of a step was last asked for
        server.routes += [
            web.get(r"/v1/{run}/{fragment:\d+}/rounds", self._answer_rounds),
            web.get(r"/v1/{run}/checkpoints", self._answer_offers),
            web.get(r"/v1/{run}/checkpoints/{step:\d+}/hashes", self._answer_hashes),
            web.get(r"/v1/{run}/checkpoints/{step:\d+}/{chunk:\d+}", self._answer_chunk),
        ]

    def wanted(self) -> list[int]:
        """The steps of the checkpoints that others are fetching, or have fetched not long ago."""
        now = time.monotonic()
        self._asked = {step: at for step, at in self._asked.items() if now - at < HOLD}
        return sorted(self._asked)

    async def _answer_rounds(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        return web.json_response(self._rounds(int(request.match_info["fragment"][:9])))

    async def _answer_offers(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        return web.json_response([asdict(offer) for offer, _ in self._checkpoints()[-MAX_OFFERS:]])

    async def _answer_hashes(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        step = int(request.match_info["step"][:18])
        for offer, path in self._checkpoints():
            if offer.step == step:
                self._asked[step] = time.monotonic()
                making = self._hashes.get(offer.digest)
                if making is None:  # the file is read once, however many ask
                    making = self._hashes[offer.digest] = asyncio.create_task(_hashes_of(path, offer.size))
                    while len(self._hashes) > KEPT:
                        del self._hashes[next(iter(self._hashes))]
                try:
                    async with asyncio.timeout(LONG_POLL):
                        return web.Response(body=await asyncio.shield(making))
                except TimeoutError:
                    return web.Response(status=202)
                except OSError:
                    self._hashes.pop(offer.digest, None)
                    break
        raise Refused(410, "this checkpoint is not kept any more")

    async def _answer_chunk(self, request: web.Request) -> web.StreamResponse:
        self._server.name_of(request)
        step, chunk = int(request.match_info["step"][:18]), int(request.match_info["chunk"][:9])
        for offer, path in self._checkpoints():
            if offer.step == step and chunk * CHUNK < offer.size:
                self._asked[step] = time.monotonic()
                try:
                    body = await asyncio.to_thread(_read_chunk, path, chunk)
                except OSError:
                    break
                self._server.counters.up["state"] += len(body)
                return await self._server.send(request, body, chunk_digest(body))
        raise Refused(410, "this checkpoint is not kept any more")


def _read_chunk(path: Path, chunk: int) -> bytes:
    with path.open("rb") as file:
        file.seek(chunk * CHUNK)
        return file.read(CHUNK)


async def _hashes_of(path: Path, size: int) -> bytes:
    return b"".join([chunk_digest(await asyncio.to_thread(_read_chunk, path, n)) for n in range(-(-size // CHUNK))])
