"""A run's store from this machine: by a cluster's invite, or as the organiser, who also writes into it what the run trains."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from isles.agent.organiser import KEY, Organiser, RunRecord
from isles.errors import NetworkError, RecordError, UsageError
from isles.identity import Authority, Certified, Invite, StoreUser, client_context
from isles.store import Entry, Store

PATIENCE = 5.0  # seconds for the store to answer while a person waits
STARTING = 10.0  # and while it is being started


@dataclass(frozen=True)
class Access:
    """A way into the store of a run."""

    run: str
    urls: tuple[str, ...]
    user: StoreUser
    authority: str  # the run's certificate, PEM
    certified: Certified

    @classmethod
    def of_invite(cls, invite: Invite) -> Access:
        return cls(invite.run, invite.store, invite.user, invite.authority, invite.certified)

    @classmethod
    def of_authority(cls, authority: Authority, urls: tuple[str, ...]) -> Access:
        return cls(
            authority.run, urls, authority.admit_organiser(), authority.certified.certificate, authority.certify("organiser")
        )

    @classmethod
    def of_organiser(cls, organiser: Organiser) -> Access:
        return cls.of_authority(organiser.authority, tuple(f"tls://{address}" for address in organiser.store))

    @asynccontextmanager
    async def store(self, patience: float = PATIENCE) -> AsyncIterator[Store]:
        """A connection while the block runs. Raises NetworkError."""
        store = await Store.connect(self.urls, self.user, client_context(self.authority, self.certified), patience=patience)
        try:
            yield store
        finally:
            await store.close()


async def publish(access: Access, record: RunRecord, members: int = 1) -> Entry | None:
    """Make the run's bucket in a store of so many members and write what the run trains, unless something stands there: then that is returned.
    Raises NetworkError when most members are not there yet."""
    async with access.store(STARTING) as store:
        await store.create_bucket(replicas=members)
        return None if await store.create(KEY, record.pack()) is not None else await store.get(KEY)


async def shown_by_store(invite: Invite) -> RunRecord:
    """The run that an invite is for, as the store shows it. Raises NetworkError, RecordError."""
    async with Access.of_invite(invite).store() as store:
        entry = await store.get(KEY)
    if entry is None:
        raise NetworkError("the store does not show what the run trains yet; the organiser starts it with `isles store`")
    record = RunRecord.parse(entry.value, "the store's record of the run")
    if record.digest != invite.spec:
        raise RecordError(
            "the store shows another spec than the one that this invite was made for; ask the organiser for a new invite"
        )
    return record


def access_to(where: Path | None) -> Access:
    """The access that a path gives: an invite, a cluster's folder, an organiser's, or that of a run on this machine. Raises UsageError."""
    if where is None:
        where = _only_one()
    if where.is_file():
        return Access.of_invite(Invite.load(where))
    if (where / "invite").exists():
        return Access.of_invite(Invite.load(where / "invite"))
    if (where / "store-1.papers").exists():
        return Access.of_organiser(Organiser.load(where))
    if (where / "authority.json").exists():
        try:
            port = int((where / "store" / "port").read_text())
        except (OSError, ValueError) as error:
            raise NetworkError(f"the store of {where} has never been started; start the run first") from error
        return Access.of_authority(Authority.load(where / "authority.json"), (f"tls://127.0.0.1:{port}",))
    raise UsageError(f"{where} is no cluster's folder, invite or organiser's folder; name one of these")


def _only_one() -> Path:
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found = sorted(p for p in Path("runs").iterdir() if (p / "invite").exists() or (p / "authority.json").exists())
    if len(found) == 1:
        return found[0]
    what = f"runs/ holds {len(found)} of them" if found else "there is none in runs/"
    raise UsageError(f"name a cluster's folder, an invite or an organiser's folder; {what}")
