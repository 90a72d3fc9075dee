"""A cluster's folder: all that its agent and its workers keep and share.

cluster.json      what the cluster is: run, name, spec, addresses (ClusterSettings)
invite            who it is to the others: certificate, key and the store's token; readable by its owner only
parameters.f32    global and handed-off parameters, mapped by agent and workers
layout.json       of a model that a script builds: its flat layout
agent.sock        where the workers find the agent
journal.json      the rounds applied since the oldest checkpoint
checkpoints/      global parameters and momentum
exchange/         chunks under way, and the averages of the last rounds
worker/           the workers' inner state
metrics.jsonl     one line a local step
status.json       how the cluster stands, every second
agent.log, worker.log
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.errors import UsageError
from isles.files import held, write_whole
from isles.spec import Spec, spec_from


@dataclass(frozen=True)
class ClusterSettings:
    """base: folder that the spec's paths count from. host, port: to listen on (0: any free port). advertise: host:port under which others reach it;
    None: as it listens. outbound_only: it cannot be reached and only makes outgoing connections. max_upload: bytes/s. ranks: workers; 0: a
    script trains, which the agent does not start. start: clusters that the run begins with."""

    run: str
    cluster: str
    spec: Spec
    base: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    outbound_only: bool = False
    max_upload: float | None = None
    ranks: int = 1
    start: int = 1


@dataclass(frozen=True)
class ClusterFolder:
    """The paths in a cluster's folder."""

    path: Path

    @property
    def settings_file(self) -> Path:
        return self.path / "cluster.json"

    @property
    def invite(self) -> Path:
        return self.path / "invite"

    @property
    def shared(self) -> Path:
        return self.path / "parameters.f32"

    @property
    def layout(self) -> Path:
        return self.path / "layout.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exchange(self) -> Path:
        return self.path / "exchange"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        return self.path / "agent.log"

    @property
    def worker_log(self) -> Path:
        return self.path / "worker.log"

    def held(self) -> AbstractContextManager[None]:
        """Keep other agents from working in the folder meanwhile. Raises UsageError when one does."""
        return held(self.path, "agent.lock")

    def write_settings(self, settings: ClusterSettings) -> None:
        """Raises UsageError when the folder cannot be written."""
        record = asdict(settings) | {"spec": settings.spec.model_dump(mode="json", exclude_none=True)}
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self.settings_file, json.dumps(record, indent=1).encode())
        except OSError as error:
            raise UsageError(
                f"the cluster's folder {self.path} cannot be written ({error.strerror}); choose another"
            ) from error

    def read_settings(self) -> ClusterSettings:
        """Raises UsageError when there are none or they are damaged."""
        try:
            record: dict[str, Any] = json.loads(self.settings_file.read_bytes())
            spec = spec_from(record.pop("spec"), source=str(self.settings_file))
            return ClusterSettings(spec=spec, **record)
        except FileNotFoundError as error:
            raise UsageError(f"{self.path} is no cluster's folder: it has no cluster.json; join the run first") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{self.settings_file} is damaged; join the run again") from error

    def read_status(self) -> dict[str, Any]:
        """What the agent last said of itself; empty while it has said nothing."""
        try:
            status: dict[str, Any] = json.loads(self.status.read_bytes())
        except (OSError, ValueError):
            return {}
        return status
