"""What an organiser's machine holds of a run, and what the store shows of it to every host.

DIR/authority.json      the run's authority: who holds it can invite
DIR/run.json            the spec as it was frozen, its digests, and where the store's members are reached
DIR/store-1.papers ...  what each member of the store needs to serve the run; the first is this machine's
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.errors import MALFORMED, RecordError, UsageError
from isles.files import write_whole
from isles.identity import Authority, Certified, Invite, StoreTrust
from isles.spec import Spec, spec_from
from isles.spec.digest import spec_digest
from isles.store import StorePapers, StoreServer

FORMAT = 1
KEY = "spec"  # of the store, under which the run's record stands


@dataclass(frozen=True)
class RunRecord:
    """What a run trains. data: digest of the prepared data; layout: of the model's flat layout; parameters: trainable ones."""

    spec: Spec
    data: str
    layout: str
    parameters: int

    @property
    def digest(self) -> str:
        """Of the spec, as invites name it."""
        return spec_digest(self.spec)

    def pack(self) -> bytes:
        spec = self.spec.model_dump(mode="json", exclude_none=True)
        record = {"format": FORMAT, "spec": spec, "data": self.data, "layout": self.layout, "parameters": self.parameters}
        return json.dumps(record).encode()

    @classmethod
    def parse(cls, data: bytes, source: str) -> RunRecord:
        """Raises RecordError, SpecError."""
        try:
            record: Any = json.loads(data)
            if record["format"] != FORMAT:
                raise RecordError(f"{source} is of format {record['format']}; use the isles that the run was created with")
            spec = spec_from(record["spec"], source=source)
            return cls(spec, str(record["data"]), str(record["layout"]), int(record["parameters"]))
        except MALFORMED as error:
            raise RecordError(
                f"{source} holds no run that this isles can read; use the isles that it was created with"
            ) from error


@dataclass(frozen=True)
class Organiser:
    """The folder of a run's organiser. store: `host:port` of each member of the store, as hosts reach it."""

    path: Path
    authority: Authority
    record: RunRecord
    store: tuple[str, ...]

    @classmethod
    def create(cls, path: Path, record: RunRecord, store: tuple[str, ...]) -> Organiser:
        """Make a run. Raises UsageError when the folder holds one, or cannot be written."""
        if (path / "authority.json").exists():
            raise UsageError(f"{path} already holds a run; choose another --out")
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = cls(path, Authority.create(), record, store)
            for number, address in enumerate(store, 1):
                papers = StorePapers.issue(made.authority, f"store-{number}", [address.rpartition(":")[0], "localhost"])
                text = json.dumps({"number": number, "members": store, "papers": asdict(papers)})
                write_whole(made.papers(number), text.encode(), mode=0o600)
            text = json.dumps({"store": store, "record": json.loads(record.pack())}, indent=1)
            write_whole(path / "run.json", text.encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
        made.authority.save(path / "authority.json")  # last: by it the folder is known as a run's
        return made

    @classmethod
    def load(cls, path: Path) -> Organiser:
        """Raises UsageError when the folder holds no run."""
        authority = Authority.load(path / "authority.json")
        try:
            kept: Any = json.loads((path / "run.json").read_bytes())
            record = RunRecord.parse(json.dumps(kept["record"]).encode(), str(path / "run.json"))
            return cls(path, authority, record, tuple(str(a) for a in kept["store"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no folder that `isles create` made, or damaged; name that folder") from error

    def papers(self, number: int) -> Path:
        return self.path / f"store-{number}.papers"

    def invite(self, name: str) -> Invite:
        """Raises UsageError for a name that no cluster can have."""
        hosts = {address.rpartition(":")[0].lower() for address in self.store} | {"localhost"}
        if name in hosts or re.fullmatch(r"store-\d+", name):  # its certificate would pass for that of the store
            raise UsageError(f"{name!r} is a name of the run's store; choose another for the cluster")
        return Invite.issue(self.authority, name, tuple(f"tls://{address}" for address in self.store), self.record.digest)


def member_of(path: Path, folder: Path, listen: str) -> StoreServer:
    """A member of a store from its papers. listen: address to listen on. Raises UsageError."""
    try:
        kept: Any = json.loads(path.read_bytes())
        papers, number, members = kept["papers"], int(kept["number"]), [str(m) for m in kept["members"]]
        trust = StoreTrust(papers["trust"]["operator"], *(_pair(papers["trust"][name]) for name in ("system", "account")))
        if "secret" not in papers:
            raise UsageError(
                f"the store's papers {path} are of an earlier isles, whose members did not know each other by a secret; make the run anew with "
                "`isles create`"
            )
        made = StorePapers(papers["run"], trust, papers["authority"], Certified(**papers["certified"]), str(papers["secret"]))
        port = int(members[number - 1].rpartition(":")[2])
    except OSError as error:
        raise UsageError(
            f"the store's papers {path} cannot be read ({error.strerror}); name what `isles create` wrote"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path} holds no papers of a store's member; name what `isles create` wrote") from error
    several = members if len(members) > 1 else []
    routes = [f"{m.rpartition(':')[0]}:{int(m.rpartition(':')[2]) + 1}" for m in several]
    return StoreServer(
        folder, made, host=listen, port=port, name=f"store-{number}", cluster_port=port + 1 if several else 0, members=routes
    )


def _pair(value: Any) -> tuple[str, str]:
    first, second = value
    return str(first), str(second)


def organised_here(path: Path | None) -> Path:
    """The folder of the run that an organiser means: the one named, or the only one under runs/. Raises UsageError."""
    if path is not None:
        return path
    found = []
    with contextlib.suppress(OSError):
        found = sorted(p.parent for p in Path("runs").glob("*/store-1.papers"))
    if len(found) == 1:
        return found[0]
    what = f"runs/ holds {len(found)} runs" if found else "there is no run in runs/"
    raise UsageError(f"{what}; name the folder that `isles create` made with --run")
