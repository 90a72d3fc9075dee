"""The agent's end of the link to its workers.

One connection at a time counts, the newest. What is said while nobody listens is not kept: a worker that comes back says how it stands, and
the owner of this object (`on_hello`) brings it up to date. `release` is the one thing that has to wait for workers that are alive and away:
the global parameters must not change under progress that has not been set apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from isles.errors import NetworkError
from isles.worker.link import (
    MAX_LINE,
    SOCKET_NAME,
    Claim,
    FromAgent,
    HandedOff,
    Hello,
    Merge,
    Merged,
    Message,
    Need,
    Release,
    Released,
    Start,
    Stepped,
    Stop,
    Stopped,
    from_line,
    short_path,
    to_line,
)  # fmt: skip

log = logging.getLogger("isles.agent")


class WorkerLink:
    """Listens for the workers. The callbacks are called in the event loop, in the order of what was said."""

    def __init__(self, folder: Path, *, alive: Callable[[], bool] = lambda: False) -> None:
        self.path = folder / SOCKET_NAME
        self._alive = alive  # whether worker processes exist, connected or not
        self.hello: Hello | None = None  # of the connection that counts
        self.holding = False  # whether these workers train, and hold progress of their own
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Condition()
        self._released: set[int] = set()
        self.on_hello: Callable[[Hello], None] = lambda _: None
        self.on_stepped: Callable[[Stepped], None] = lambda _: None
        self.on_handed_off: Callable[[HandedOff], None] = lambda _: None
        self.on_need: Callable[[Need], None] = lambda _: None
        self.on_stopped: Callable[[Stopped], None] = lambda _: None

    async def start(self) -> None:
        """Raises NetworkError when the socket cannot be made."""
        try:
            self.path.unlink(missing_ok=True)
            with short_path(self.path) as path:
                self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_LINE)
            self.path.chmod(0o600)
        except OSError as error:
            raise NetworkError(f"the socket {self.path} for the workers cannot be made ({error.strerror or error})") from error

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        self.path.unlink(missing_ok=True)

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def dismiss(self, reason: str) -> None:
        """Tell the workers to stop, and hear no more of what they say."""
        self.send(Stop(reason))
        self._writer = None

    def gone(self) -> None:
        """The worker processes have ended: nobody holds any progress."""
        self.holding = False
        self._released.clear()

    # --- what the driver needs

    async def release(self, fragment: int) -> bool:
        """Have the workers set their unsent progress apart. Returns when they have (True), or when there are none that hold any (False)."""
        self._released.discard(fragment)
        asked: asyncio.StreamWriter | None = None
        while self.holding or (self.hello is None and self._alive()):
            if self._writer is not None and self._writer is not asked:
                asked = self._writer
                self.send(Release(fragment))
            async with self._changed:
                if fragment in self._released:
                    return True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await self._changed.wait()
            if fragment in self._released:
                return True
        return False

    async def merge(self, fragment: int, number: int, *, late: bool, landed: bool, step: int) -> None:
        self._released.discard(fragment)
        self.send(Merge(fragment, number, late, landed, step))

    def send(self, message: FromAgent) -> None:
        """Say something, if workers are connected."""
        if self._writer is not None:
            self._writer.write(to_line(message))

    # --- the connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = writer
        try:
            while line := await reader.readline():
                if self._writer is writer:
                    self._take(from_line(line))
                    await self._notify()
        except (NetworkError, ValueError) as error:
            log.error("workers: %s", error)
            self.send(Stop(str(error)))
        except OSError:
            pass
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _take(self, message: Message) -> None:
        match message:
            case Hello():
                self.hello = message
                self._released = set(message.released)
                self.holding = not message.fresh
                self.on_hello(message)
            case Stepped():
                self.on_stepped(message)
            case HandedOff():
                self.on_handed_off(message)
            case Released(fragment):
                self._released.add(fragment)
            case Need():
                self.on_need(message)
            case Stopped():
                self.holding = False
                self.on_stopped(message)
            case Merged():
                pass
            case _:
                raise NetworkError(
                    f"a worker says {type(message).__name__}, which is not its part; run the same isles for both"
                )

    def begin(self, start: Start) -> None:
        """Tell fresh workers where to begin."""
        self.holding = True
        self.send(start)

    def claim(self, claim: Claim) -> None:
        self.send(claim)
