"""The cluster's worker processes: started, watched, restarted a bounded number of times, and found again after the agent itself was restarted.

Workers are a torch.distributed group: when one rank dies the others hang in their next collective, so the group is ended and started
as a whole. They run in a session of their own, and do not die with the agent: who they are is written down, so that the next
agent adopts them and not a step is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isles.errors import IslesError
from isles.files import write_whole
from isles.store.server import free_port

log = logging.getLogger("isles.agent")

RESTARTS = 5  # within WINDOW; more than that is a mistake that restarting does not mend
WINDOW = 600.0  # seconds
POLL = 0.2  # seconds between looks at processes


class WorkersFailed(IslesError):
    """The workers end with an error again and again."""


@dataclass(frozen=True)
class Process:
    """A process that can be told from a later one of the same number."""

    pid: int
    born: str  # start time as the kernel counts it; empty where it does not tell

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _born(pid))

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return _born(self.pid) == self.born and not _is_zombie(self.pid)

    def send(self, number: int) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def write_down(record: Path, processes: Sequence[Process]) -> None:
    """Leave word of processes for the next agent."""
    write_whole(record, json.dumps([{"pid": p.pid, "born": p.born} for p in processes]).encode(), durable=False)


def written_down(record: Path) -> list[Process]:
    """The processes that an earlier agent wrote down, alive or not; none when there is no such file, or it is damaged."""
    try:
        return [Process(int(row["pid"]), str(row["born"])) for row in json.loads(record.read_text())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class Supervisor:
    """Keeps `ranks` workers of one cluster running.

    command: of one worker; rank and master address are given to it by environment, as torchrun names them. record: file that the processes
    are written down in; log_file: where their output goes. started: called each time a new group was started (not when one was adopted). over:
    whether workers that end have done all there was to do, whatever their exit code (nobody knows that of adopted ones)."""

    def __init__(
        self, command: Sequence[str], ranks: int, *, record: Path, log_file: Path, environment: Mapping[str, str] | None = None,
        started: Callable[[], None] = lambda: None, over: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.command, self.ranks, self.record, self.log_file = list(command), ranks, record, log_file
        self._environment, self._started, self._over = dict(environment or {}), started, over
        self._children: list[subprocess.Popen[bytes]] = []
        self._group: list[Process] = []
        self._failures: list[float] = []
        self._stopping = self._restarting = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._group]

    async def run(self) -> None:
        """Keep the workers running until `over`, or `stop` is called; those that end before, also in order, are started again.

        Raises WorkersFailed."""
        self._adopt()
        while not self._stopping:
            if not self._group:
                self._start()
            code = await self._ended()
            if self._restarting:
                await self._end_group(signal.SIGKILL, 5.0)
                self._restarting = False
                continue
            if self._stopping or self._over():
                return
            await self._end_group(signal.SIGKILL, 5.0)
            self._failures = [t for t in self._failures if time.monotonic() - t < WINDOW] + [time.monotonic()]
            if len(self._failures) > RESTARTS:
                raise WorkersFailed(
                    f"the workers failed {len(self._failures)} times in {WINDOW / 60:.0f} minutes; the reason is at the end of {self.log_file}"
                )
            log.warning(
                "a worker ended with %s; starting all of them again (%d of %d)", _said(code), len(self._failures), RESTARTS
            )
            await asyncio.sleep(min(30.0, 0.5 * 2 ** (len(self._failures) - 1)))

    async def stop(self, grace: float) -> None:
        """Ask the workers to save and end; after `grace` seconds, make them."""
        self._stopping = True
        await self._end_group(signal.SIGTERM, grace)

    async def restart(self) -> None:
        """End the workers, and have new ones started; that counts as no failure. Returns when the old ones are gone."""
        self._restarting = True
        while self._restarting and not self._stopping:
            await asyncio.sleep(POLL / 10)

    def _adopt(self) -> None:
        """Take over a group that an earlier agent started, if all of it is alive; end what is left of a broken one."""
        group = written_down(self.record)
        if not group:
            return
        alive = [process for process in group if process.alive()]
        if len(alive) == len(group) == self.ranks:
            self._group = group
            log.info("found the workers that were running: %s", self.pids)
            return
        for process in alive:
            process.send(signal.SIGKILL)

    def _start(self) -> None:
        port = free_port("127.0.0.1") if self.ranks > 1 else 0
        self._children = []
        with self.log_file.open("ab") as output:
            for rank in range(self.ranks):
                ranks = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": self.ranks,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                environment = os.environ | self._environment | {k: str(v) for k, v in ranks.items()}
                self._children.append(
                    subprocess.Popen(
                        self.command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=environment,
                        start_new_session=True,
                    )
                )
        self._group = [Process.of(child.pid) for child in self._children]
        write_down(self.record, self._group)
        log.info("started the workers: %s", self.pids)
        self._started()

    async def _ended(self) -> int | None:
        """Wait until all workers have ended well (0) or one has not (its exit code; None of an adopted one, whose code nobody knows)."""
        while not self._stopping and not self._restarting:
            codes = {child.pid: child.poll() for child in self._children}
            for process in self._group:
                if process.pid in codes:
                    if codes[process.pid]:
                        return codes[process.pid]
                elif not process.alive():
                    return None
            if codes and all(code == 0 for code in codes.values()):
                return 0
            await asyncio.sleep(POLL)
        return 0

    async def _end_group(self, number: int, grace: float) -> None:
        for process in self._group:
            process.send(number)
        deadline = time.monotonic() + grace
        while any(self._running(p) for p in self._group) and time.monotonic() < deadline:
            await asyncio.sleep(POLL / 4)
        for process in self._group:
            process.send(signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
        self._group, self._children = [], []
        self.record.unlink(missing_ok=True)

    def _running(self, process: Process) -> bool:
        for child in self._children:
            if child.pid == process.pid:
                return child.poll() is None
        return process.alive()


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name, which may hold anything; empty where there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _born(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == ["Z"]


def _said(code: int | None) -> str:
    if code is None:
        return "an unknown exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
