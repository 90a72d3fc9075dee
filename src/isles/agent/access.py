"""Who may read a run's record from this machine, and how: by a cluster's invite, or as the organiser."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from isles.agent.organiser import Organiser
from isles.errors import NetworkError, UsageError
from isles.identity import Authority, Certified, Invite, StoreUser, client_context
from isles.store import Store

PATIENCE = 5.0  # seconds for the store to answer while a person waits


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

    async def connect(self) -> Store:
        """Raises NetworkError."""
        return await Store.connect(self.urls, self.user, client_context(self.authority, self.certified), patience=PATIENCE)


def access_to(where: Path | None) -> Access:
    """The access that a path gives: an invite, a cluster's folder, an organiser's, or that of a run on this machine. Raises UsageError."""
    if where is None:
        where = _only_one()
    if where.is_file():
        return Access.of_invite(Invite.load(where))
    if (where / "invite").exists():
        return Access.of_invite(Invite.load(where / "invite"))
    if (where / "store-1.papers").exists():
        organiser = Organiser.load(where)
        return Access.of_authority(organiser.authority, tuple(f"tls://{address}" for address in organiser.store))
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
