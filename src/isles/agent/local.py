"""A whole run on one machine, with everything that a run between continents has: a store, and an agent and its workers per cluster.

    DIR/authority.json, DIR/store/            the run's authority and its one-member store
    DIR/clusters/cluster-0000/ ...            a folder for each cluster

Started again in the same folder, the run goes on from what is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from isles.agent.access import Access, publish
from isles.agent.folder import ClusterFolder, ClusterSettings
from isles.agent.launch import running_agent, start_agent
from isles.agent.organiser import RunRecord
from isles.errors import NetworkError
from isles.identity import Authority, Invite
from isles.spec import Spec
from isles.spec.digest import spec_digest
from isles.store import StorePapers, StoreServer

log = logging.getLogger("isles.agent")


class LocalRun:
    """The processes of a run on this machine."""

    def __init__(
        self, folder: Path, spec: Spec, base: Path, *, ranks: Sequence[int] = (), outbound_only: Sequence[int] = (),
        max_upload: float | None = None, begin_with: int | None = None,
    ) -> None:  # fmt: skip
        """ranks: workers of each cluster; outbound_only: numbers of clusters that cannot be reached; max_upload: bytes/s of each;
        begin_with: clusters that the run begins with, all when left out."""
        self.folder, self.spec, self.base = folder, spec, base.resolve()
        self.count = spec.clusters.count
        self._ranks, self._outbound_only = list(ranks) or [1] * self.count, set(outbound_only)
        self._max_upload, self._begin_with = max_upload, begin_with or self.count
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.server: StoreServer | None = None
        self.authority = self._authority()

    def _authority(self) -> Authority:
        path = self.folder / "authority.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return Authority.load(path)
        made = Authority.create()
        made.save(path)
        return made

    def cluster(self, number: int) -> ClusterFolder:
        return ClusterFolder(self.folder / "clusters" / f"cluster-{number:04d}")

    async def start(self, clusters: Sequence[int] | None = None) -> None:
        """Start the store and the agents. Raises NetworkError, UsageError."""
        await self.start_store()
        for number in range(self.count) if clusters is None else clusters:
            self.start_agent(number)

    async def start_store(self) -> None:
        papers = StorePapers.issue(self.authority, "store", ["127.0.0.1", "localhost"])
        self.server = StoreServer(self.folder / "store", papers)
        await self.server.start()
        await publish(
            Access.of_authority(self.authority, (self.server.url,)), RunRecord(self.spec, data="", layout="", parameters=0)
        )

    def start_agent(self, number: int) -> None:
        """Start one cluster's agent, which starts its workers."""
        folder, name = self.cluster(number), f"cluster-{number:04d}"
        if self.server is None:
            raise NetworkError("the store is not running")
        left = running_agent(folder)  # by a command that was killed
        if left is not None:
            os.kill(left, signal.SIGKILL)
        folder.write_settings(
            ClusterSettings(
                run=self.authority.run, cluster=name, spec=self.spec, base=str(self.base), ranks=self._ranks[number],
                outbound_only=number in self._outbound_only, start=self._begin_with, max_upload=self._max_upload,
            )
        )  # fmt: skip
        if not folder.invite.exists():
            Invite.issue(self.authority, name, (self.server.url,), spec_digest(self.spec)).save(folder.invite)
        self.agents[number] = start_agent(folder)

    async def wait(self, clusters: Sequence[int] | None = None) -> dict[int, int]:
        """Wait until the agents have ended: their exit codes."""
        numbers = list(self.agents if clusters is None else clusters)
        while any(self.agents[n].poll() is None for n in numbers):
            await asyncio.sleep(0.05)
        return {n: int(self.agents[n].returncode) for n in numbers}

    async def stop(self, grace: float = 25.0) -> None:
        """Have every cluster leave in order, then end the store; whoever does not end within `grace` seconds is made to."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace)
        self.kill()
        if self.server is not None:
            await self.server.stop()

    def kill(self) -> None:
        """End whatever is left of the clusters' processes."""
        for number, agent in self.agents.items():
            if agent.poll() is None:
                agent.kill()
                agent.wait()
            for pid in self.cluster(number).read_status().get("workers", []):
                if _is_worker(pid, self.cluster(number).path):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _is_worker(pid: int, folder: Path) -> bool:
    """Whether a process number still means the worker that it did."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
