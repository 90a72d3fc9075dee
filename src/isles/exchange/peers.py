"""The other clusters, as this one reaches them: requests with retries, and who holds things up.

A request is repeated until it succeeds or its caller gives it up; all of them are idempotent, so a lost connection costs one chunk. Nobody
sets a time-out: a peer is blamed at once when its machine refuses the connection, and otherwise when it has not moved a byte for
many times as long as its chunks have taken. Blame is lifted by the next byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp

from isles.errors import NetworkError
from isles.exchange.frames import MAX_FRAME
from isles.exchange.rate import Counters, Purpose, RateCap
from isles.exchange.speed import LineSpeed

log = logging.getLogger("isles.exchange")

PATIENCE = 8.0  # seconds without a byte before a peer is blamed that has moved nothing yet, and at least
CONGESTION = "bbr"  # keeps a long lossy line full where the usual one does not
CLOSING = 0.2  # seconds in which a peer may agree to the end of a lane
WAITING = 1 << 14  # bytes of a lane that wait in this process, and in the kernel without having been sent
GIVEN_UP = 4000  # milliseconds without an acknowledgement after which a connection is lost: TCP would go on trying for minutes, ever more rarely
KEPT = 300.0  # seconds for which an idle connection stays: setting one up takes three round trips
TIMES = 10  # and so many times as long as its chunks have taken
DIGEST = "X-Isles-Blake3"
ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, ssl.SSLError)


@dataclass
class Health:
    """What is known of the way to a peer."""

    moved_at: float = field(default_factory=time.monotonic)
    refused: bool = False
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=32))  # that chunks have taken
    said: str = ""  # the last complaint in the log, so that it is not said again and again

    def alive(self) -> None:
        """Something came from the peer."""
        self.moved_at, self.refused = time.monotonic(), False

    def moved(self, seconds: float) -> None:
        """A chunk has gone through, in so many seconds."""
        self.alive()
        self.said = ""
        self.seconds.append(seconds)

    def patience(self) -> float:
        return max(PATIENCE, TIMES * median(self.seconds)) if self.seconds else PATIENCE

    def stuck(self, since: float) -> bool:
        """Whether the peer holds up work that began at `since`."""
        return self.refused or time.monotonic() - max(since, self.moved_at) > self.patience()


@dataclass(frozen=True)
class Answer:
    """status 200, or 202: not yet. digest: of the body, in hex, as the peer says."""

    status: int
    body: bytes
    digest: str


class Peers:
    """Requests to other clusters. Addresses may change between calls; health stays with the name."""

    def __init__(self, client_ssl: ssl.SSLContext, cap: RateCap, counters: Counters, speed: LineSpeed) -> None:
        self._ssl, self.cap, self.counters, self._speed = client_ssl, cap, counters, speed
        self._health: dict[str, Health] = {}
        self._session: aiohttp.ClientSession | None = None

    def health(self, peer: str) -> Health:
        return self._health.setdefault(peer, Health())

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT, ssl=self._ssl, socket_factory=self._socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=None)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, read_bufsize=1 << 20, ws_response_class=Lane
        )

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        made = connected_socket(info)
        self._speed.watch(made)
        return made

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # connections close in the next turn of the loop

    async def lane(self, peer: str, address: str, path: str) -> aiohttp.ClientWebSocketResponse:
        """A connection for frames. Raises one of ERRORS."""
        return await self._running.ws_connect(
            f"https://{address}{path}", server_hostname=peer, max_msg_size=MAX_FRAME, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSING)
        )  # fmt: skip

    async def get(self, peer: str, address: str, path: str, limit: int, purpose: Purpose) -> Answer:
        """GET until there is an answer: a body of at most `limit` bytes."""
        pause = Pause()
        while True:
            async with Attempt(self, peer, address):
                return await self.get_once(peer, address, path, limit, purpose)
            await pause.wait()

    async def get_once(self, peer: str, address: str, path: str, limit: int, purpose: Purpose) -> Answer:
        """GET. Raises one of ERRORS, or TooEarly."""
        health, began = self.health(peer), time.monotonic()
        async with self._request("GET", peer, address, path) as answer:
            if answer.status not in (200, 202):
                await self._refuse(peer, address, answer)
            body = await self._read(answer, limit, health)
            health.alive()
            if answer.status == 200:
                self.counters.down[purpose] += len(body)
                health.moved(time.monotonic() - began)
            return Answer(answer.status, body, answer.headers.get(DIGEST, ""))

    def _request(self, method: str, peer: str, address: str, path: str) -> Any:
        return self._running.request(method, f"https://{address}{path}", server_hostname=peer, allow_redirects=False)

    @property
    def _running(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise NetworkError("the exchange is not running; start it first")
        return self._session

    async def _read(self, answer: aiohttp.ClientResponse, limit: int, health: Health) -> bytes:
        """A body whose length is known and bounded before memory is taken."""
        length = answer.content_length
        if length is None or length > limit:
            raise aiohttp.ClientPayloadError(f"a body of {length} bytes where at most {limit} fit")
        parts, left = [], length
        while left:
            part = await answer.content.readany()
            if not part:
                raise aiohttp.ClientPayloadError("the body was cut short")
            health.alive()
            left -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _refuse(self, peer: str, address: str, answer: aiohttp.ClientResponse) -> None:
        """Any other answer: 425 is 'too early' and no failure of the peer; the rest is said in the log."""
        text = (await answer.content.read(300)).decode(errors="replace")
        health = self.health(peer)
        if answer.status == 425:
            health.alive()
            raise TooEarly
        self.declined(peer, address, answer.status, text or answer.reason or "")
        raise Declined

    def declined(self, peer: str, address: str, status: int, text: str) -> None:
        """The peer has answered, and does not take or give what was meant."""
        self._complain(self.health(peer), f"{peer} at {address} answers {status}: {text}")

    def failed(self, peer: str, address: str, error: BaseException) -> None:
        health = self.health(peer)
        health.refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)
        if isinstance(error, Declined):
            return  # _refuse has said it
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            text = f"{peer} at {address} does not prove that it is {peer} ({error.certificate_error}); it needs an invite of this run"
        elif health.refused:
            text = f"{peer} at {address} refuses connections; it may have stopped, or advertise a wrong address"
        else:
            text = f"{peer} at {address}: {error or type(error).__name__}; trying again"
        self._complain(health, text)

    def _complain(self, health: Health, text: str) -> None:
        if text != health.said:
            health.said = text
            log.warning("%s", text)


class Lane(aiohttp.ClientWebSocketResponse):
    """A WebSocket that does not take more than it can send soon."""

    def __init__(
        self, reader: Any, writer: Any, protocol: Any, response: aiohttp.ClientResponse, *more: Any, **named: Any
    ) -> None:
        super().__init__(reader, writer, protocol, response, *more, **named)
        if response.connection is not None:
            shorten(response.connection.transport)


def shorten(transport: asyncio.BaseTransport | None) -> None:
    """Let little wait in this process for a connection: what waits there another connection could have sent."""
    if isinstance(transport, asyncio.WriteTransport):
        transport.set_write_buffer_limits(high=WAITING)


class Pause:
    """Between two tries: longer each time, up to a second."""

    def __init__(self) -> None:
        self._next = 0.05

    async def wait(self) -> None:
        await asyncio.sleep(self._next)
        self._next = min(1.0, self._next * 2)


class Declined(aiohttp.ClientError):
    """The peer gave an answer of another kind than was hoped for."""


class TooEarly(Exception):
    """The peer has not seen the round's record yet."""


class Attempt(contextlib.AbstractAsyncContextManager[None]):
    """One try of a request: what may go wrong between machines is noted and not raised."""

    def __init__(self, peers: Peers, peer: str, address: str) -> None:
        self._peers, self._peer, self._address = peers, peer, address

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, TooEarly):
            return True
        if isinstance(error, ERRORS):
            self._peers.failed(self._peer, self._address, error)
            return True
        return False


def connected_socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket for an outgoing connection, tuned for long lines."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    tune(made)
    return made


def tune(made: socket.socket) -> None:
    """No waiting for full packets; BBR where the kernel offers it, which keeps a long lossy line full where the default does not. A sign of life
    every half minute, so that no router on the way forgets an idle connection."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    for option, value in (("TCP_USER_TIMEOUT", GIVEN_UP), ("TCP_NOTSENT_LOWAT", WAITING)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError, AttributeError):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())


def congestion() -> str:
    """The congestion control that connections get here: `CONGESTION`, where the kernel has it."""
    with socket.socket() as probe, contextlib.suppress(OSError, AttributeError):
        tune(probe)
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    return ""


def addresses(peers: Mapping[str, str | None], without: str) -> dict[str, str]:
    """The peers that can be reached, by name, this cluster excepted."""
    return {name: address for name, address in peers.items() if address is not None and name != without}
