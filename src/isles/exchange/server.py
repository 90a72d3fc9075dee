"""What other clusters may ask of this one, over HTTPS with certificates on both sides.

    GET /v1/RUN/lane                                                       a WebSocket for frames, both ways (`links`)
    GET /v1/RUN/FRAGMENT/ROUND/contributions/CLUSTER/INCARNATION           the chunks of it that the owner already has (JSON)
    GET /v1/RUN/FRAGMENT/ROUND/ATTEMPT/averages/CHUNK                      a chunk of the average, from its owner; 202 while it waits for somebody, or has it on a lane
    GET /v1/RUN/FRAGMENT/ROUND/results/DIGEST                              the description of a committed average
    GET /v1/RUN/FRAGMENT/ROUND/results/DIGEST/CHUNK                        a chunk of it, from anyone who holds it

The name in a peer's certificate is the only identity; a cluster can only send what is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from isles.errors import CodecError, IslesError, NetworkError
from isles.exchange.frames import MAX_FRAME
from isles.exchange.peers import CLOSING, DIGEST, KEPT, WAITING, shorten, tune
from isles.exchange.rate import Counters, RateCap, send_slices
from isles.exchange.speed import LineSpeed
from isles.exchange.spool import Averages

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
EARLY = 2.0  # seconds that a request waits for this cluster to see the round's record
LONG_POLL = 5.0  # seconds that a request for an average waits for it


class Refused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Reduction(Protocol):
    """The owner's side of a task, as the server needs it."""

    def missing(self, chunk: int) -> list[str]: ...
    def received(self, cluster: str, incarnation: str) -> list[int]: ...
    async def average(self, chunk: int) -> tuple[bytes, bytes]: ...


Carry = Callable[[str, web.WebSocketResponse], Awaitable[None]]  # peer, lane: frames both ways until it is lost
Find = Callable[[int, int, int | None], Awaitable[Reduction]]  # fragment, round, attempt -> reduction; raises Refused
Coming = Callable[[str, Reduction, int], bool]  # peer, reduction, chunk


class Server:
    """Listens, checks and answers. `find` gives the reduction of a round that this cluster takes part in, `coming` says whether an average is on its way to somebody."""

    def __init__(
        self, run: str, server_ssl: ssl.SSLContext, peer_name: Callable[[ssl.SSLObject], str], find: Find, carry: Carry,
        averages: Averages, cap: RateCap, counters: Counters, speed: LineSpeed, coming: Coming,
    ) -> None:  # fmt: skip
        self.run, self._ssl, self._peer_name, self._find, self._carry = run, server_ssl, peer_name, find, carry
        self._averages, self._cap, self.counters, self._speed, self._coming = averages, cap, counters, speed, coming
        self._runner: web.AppRunner | None = None
        self.routes: list[web.RouteDef] = [
            web.get(r"/v1/{run}/lane", self._lane),
            web.get(r"/v1/{run}/{fragment:\d+}/{round:\d+}/contributions/{cluster}/{incarnation}", self._have),
            web.get(r"/v1/{run}/{fragment:\d+}/{round:\d+}/{attempt:\d+}/averages/{chunk:\d+}", self._average),
            web.get(r"/v1/{run}/{fragment:\d+}/{round:\d+}/results/{digest}", self._manifest),
            web.get(r"/v1/{run}/{fragment:\d+}/{round:\d+}/results/{digest}/{chunk:\d+}", self._result),
        ]

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises NetworkError when the address cannot be had."""
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.add_routes(self.routes)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=KEPT + 30)
        await self._runner.setup()
        try:
            listening = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512
            )
        except OSError as error:
            await self._runner.cleanup()
            why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise NetworkError(f"{host}:{port} cannot be listened on ({why}); choose another port or address") from error
        tune(listening)  # accepted connections inherit it
        await web.SockSite(self._runner, listening, ssl_context=self._ssl).start()
        return int(listening.getsockname()[1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who asks, for which run; and every refusal as a sentence."""
        if request.transport is not None:
            self._speed.watch(request.transport)
        try:
            if request.match_info.get("run") != self.run:
                raise Refused(404, "this is another run; ask its organiser for an invite")
            return await handler(request)
        except Refused as refused:
            return web.Response(status=refused.status, text=str(refused))
        except CodecError as error:
            return web.Response(status=400, text=str(error))
        except IslesError as error:
            return web.Response(status=507, text=str(error))

    def name_of(self, request: web.Request) -> str:
        """The cluster that asks, as its certificate says."""
        transport = request.transport
        secured = transport.get_extra_info("ssl_object") if transport is not None else None
        if secured is None:
            raise Refused(403, "no certificate was shown")
        return self._peer_name(secured)

    async def _reduction(self, request: web.Request) -> Reduction:
        fragment, number = _number(request, "fragment"), _number(request, "round")
        attempt = _number(request, "attempt") if "attempt" in request.match_info else None
        return await self._find(fragment, number, attempt)

    async def _lane(self, request: web.Request) -> web.StreamResponse:
        peer = self.name_of(request)
        shorten(request.transport)
        lane = web.WebSocketResponse(compress=False, max_msg_size=MAX_FRAME, writer_limit=WAITING, timeout=CLOSING)
        await lane.prepare(request)
        await self._carry(peer, lane)
        return lane

    async def _have(self, request: web.Request) -> web.StreamResponse:
        cluster = request.match_info["cluster"]
        if self.name_of(request) != cluster:
            raise Refused(403, f"only {cluster} may ask for what it sent")
        reduction = await self._reduction(request)
        return web.json_response(reduction.received(cluster, request.match_info["incarnation"]))

    async def _average(self, request: web.Request) -> web.StreamResponse:
        peer = self.name_of(request)
        reduction, chunk = await self._reduction(request), _number(request, "chunk")
        try:
            async with asyncio.timeout(LONG_POLL):
                body, digest = await reduction.average(chunk)
        except TimeoutError:
            return web.json_response({"missing": reduction.missing(chunk)}, status=202)
        if self._coming(peer, reduction, chunk):  # no line carries it twice
            return web.json_response({"missing": []}, status=202)
        self.counters.up["averages"] += len(body)
        return await self.send(request, body, digest)

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._kept(request).manifest.to_json())

    async def _result(self, request: web.Request) -> web.StreamResponse:
        average, chunk = self._kept(request), _number(request, "chunk")
        if chunk >= len(average.manifest.sizes):
            raise Refused(404, f"there is no chunk {chunk}")
        body = await asyncio.to_thread(average.encoded, chunk)
        self.counters.up["results"] += len(body)
        return await self.send(request, body, bytes.fromhex(average.manifest.digests[chunk]))

    def _kept(self, request: web.Request) -> Any:
        self.name_of(request)
        found = self._averages.get(_number(request, "fragment"), _number(request, "round"), request.match_info["digest"])
        if found is None:
            raise Refused(404, "this average is not kept here")
        return found

    async def send(self, request: web.Request, body: bytes, digest: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={DIGEST: digest.hex(), "Content-Type": "application/octet-stream"})
        answer.content_length = len(body)
        with contextlib.suppress(ConnectionError):  # who asked is gone, or has it by now
            await answer.prepare(request)
            await send_slices(body, answer.write, self._cap)
            await answer.write_eof()
        return answer


def _number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if len(text) > 18:
        raise Refused(404, f"{name} {text[:20]}... is out of bounds")
    return int(text)
