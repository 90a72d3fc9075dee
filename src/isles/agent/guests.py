"""Workers that the agent does not start: the process of a training script, which comes, goes and comes again.

It is known by the Hello of its session. Who it is is written down, as with workers that the agent starts, so that the next agent knows of
progress that has to be set apart before a round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from isles.agent.supervisor import POLL, Process, write_down, written_down

log = logging.getLogger("isles.agent")

ABSENCE = 600.0  # seconds without a script after which the cluster leaves the run


class Guests:
    """Watches the script of one cluster. It stands where a `Supervisor` stands, and starts and ends nothing.

    record: file that the process is written down in. gone: called when a script is no more, and holds nothing. over: whether there is nothing
    left to train; connected: whether a script is; leave: called when none has come for a long time."""

    def __init__(
        self, *, record: Path, gone: Callable[[], None], over: Callable[[], bool], connected: Callable[[], bool], leave: Callable[[], None]
    ) -> None:  # fmt: skip
        self.record, self._gone, self._over, self._connected, self._leave = record, gone, over, connected, leave
        self._process = next((p for p in written_down(record) if p.alive()), None)  # whom an earlier agent knew
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def came(self, pid: int) -> None:
        """A script's session is connected."""
        process = Process.of(pid)
        if process != self._process:
            self._process = process
            write_down(self.record, [process])
            log.info("a script trains: process %d", pid)

    def went(self) -> None:
        """The script has ended its session; whether its process goes on does not matter any more."""
        self._process = None
        self.record.unlink(missing_ok=True)

    async def run(self) -> None:
        """Return when there is nothing left to train and no script to be told so, or `stop` is called."""
        seen = time.monotonic()
        while not self._stopping and not (self._over() and not self._connected()):
            if self._process is not None and not self._process.alive():
                log.warning("the script's process %d is gone; waiting for it to be started again", self._process.pid)
                self.went()
                self._gone()
            if self._process is not None:
                seen = time.monotonic()
            elif time.monotonic() - seen > ABSENCE:
                log.warning("no script has come for %.0f minutes", ABSENCE / 60)
                self._leave()
                return
            await asyncio.sleep(POLL)

    async def stop(self, grace: float) -> None:  # noqa: ARG002 - a script ends when it likes
        """Wait for nobody any more."""
        self._stopping = True

    async def restart(self) -> None:
        """What the script holds counts no more; it has been told, and somebody has to start it again."""
        self.went()
        self._gone()
