"""The run's authority: held by the organiser, needed to invite and for nothing else.

It signs two kinds of papers for every cluster: a certificate, by which agents know each other, and a token for the store, which lets the
cluster write its own records and those that all write by compare-and-set (the store does not hold it to that), and no others.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.errors import UsageError
from isles.files import write_whole
from isles.identity.certificates import Certified, issue, make_authority
from isles.identity.nkeys import Nkey, token

BUCKET = "run"  # the key-value bucket of a store; a store holds one run
NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")
FORMAT = 1
_UNLIMITED = ("subs", "data", "payload")
_ACCOUNT = (
    *_UNLIMITED, "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage", "streams", "consumer", "max_ack_pending",
)  # fmt: skip


@dataclass(frozen=True)
class StoreUser:
    """Who one is to the store: a token and the seed of its key."""

    jwt: str
    seed: str

    def __repr__(self) -> str:
        return "StoreUser(...)"


@dataclass(frozen=True)
class StoreTrust:
    """What a store's server must know to let the run's clusters in: nothing secret."""

    operator: str  # JWT
    system: tuple[str, str]  # public key and JWT of the account for the servers themselves
    account: tuple[str, str]  # public key and JWT of the run's account


@dataclass(frozen=True)
class Authority:
    """The keys of a run. Printing it shows none of them."""

    run: str
    certified: Certified
    operator: Nkey
    system: Nkey
    account: Nkey

    @classmethod
    def create(cls) -> Authority:
        """A new run, with a name of its own."""
        run = secrets.token_hex(8)
        return cls(run, make_authority(run), Nkey.new("operator"), Nkey.new("account"), Nkey.new("account"))

    def save(self, path: Path) -> None:
        """Write the authority's file, readable by its owner only. Raises UsageError."""
        record = {
            "format": FORMAT, "run": self.run, "certificate": self.certified.certificate, "key": self.certified.key,
            "operator": self.operator.seed, "system": self.system.seed, "account": self.account.seed,
        }  # fmt: skip
        try:
            write_whole(path, json.dumps(record, indent=1).encode(), mode=0o600)
        except OSError as error:
            raise UsageError(
                f"the run's authority cannot be written to {path} ({error.strerror}); choose another folder"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Authority:
        """Raises UsageError when there is none, or it is damaged."""
        try:
            record: Any = json.loads(path.read_bytes())
            if record["format"] != FORMAT:
                raise UsageError(
                    f"{path} is of format {record['format']}, this isles reads {FORMAT}; use the isles that wrote it"
                )
            keys = [Nkey.from_seed(record[name]) for name in ("operator", "system", "account")]
            return cls(str(record["run"]), Certified(record["certificate"], record["key"]), *keys)
        except FileNotFoundError as error:
            raise UsageError(f"{path} does not exist; only who created the run holds its authority") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no authority of a run, or damaged; use the copy that was kept of it") from error

    def __repr__(self) -> str:
        return f"Authority({self.run})"

    def certify(self, name: str, addresses: Sequence[str] = ()) -> Certified:
        """A certificate for a cluster, or with addresses for a member of the store. Raises UsageError for a name that no cluster can have."""
        if not NAME.match(name):
            raise UsageError(
                f"{name!r} is no name for a cluster; use up to 63 of a-z, 0-9 and -, beginning with a letter or digit"
            )
        return issue(self.certified, name, addresses)

    def members_secret(self) -> str:
        """What members of the store show each other, and nobody else has."""
        return hmac.new(self.system.seed.encode(), b"isles: members of the store", "sha256").hexdigest()

    def trust(self) -> StoreTrust:
        operator = token(
            self.operator, self.operator.public, self.run, {"type": "operator", "system_account": self.system.public}
        )
        return StoreTrust(
            operator,
            (self.system.public, self._account("system", self.system)),
            (self.account.public, self._account("run", self.account)),
        )

    def _account(self, name: str, key: Nkey) -> str:
        limits: dict[str, Any] = dict.fromkeys(_ACCOUNT, -1) | {"wildcards": True}
        if name == "system":
            limits |= dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer", "max_ack_pending"), 0)
        return token(
            self.operator,
            key.public,
            name,
            {"type": "account", "limits": limits, "default_permissions": {"pub": {}, "sub": {}}},
        )

    def admit(self, cluster: str) -> StoreUser:
        """A cluster's access to the store: it reads everything, and writes its own records and those that clusters share (rounds, claims, the
        layout). The store does not hold a writer of these to compare-and-set; who reads them checks them."""
        keys = [
            f"members.{cluster}",
            f"figures.{cluster}",
            f"ready.*.{cluster}",
            f"done.*.{cluster}",
            "rounds.*",
            "ledger",
            "layout",
        ]
        return self._user(cluster, [f"$KV.{BUCKET}.{key}" for key in keys])

    def admit_organiser(self) -> StoreUser:
        """May make the bucket and write the spec."""
        stream = f"KV_{BUCKET}"
        return self._user(
            "organiser", [f"$KV.{BUCKET}.>", f"$JS.API.STREAM.CREATE.{stream}", f"$JS.API.STREAM.UPDATE.{stream}"]
        )

    def _user(self, name: str, write: list[str]) -> StoreUser:
        stream, key = f"KV_{BUCKET}", Nkey.new("user")
        read = [
            "$JS.API.INFO", f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.>",
            f"$JS.API.CONSUMER.CREATE.{stream}.>", f"$JS.API.CONSUMER.CREATE.{stream}", f"$JS.API.CONSUMER.INFO.{stream}.>",
            f"$JS.API.CONSUMER.DELETE.{stream}.>", "$JS.FC.>", f"$JS.ACK.{stream}.>",
        ]  # fmt: skip
        claims = dict.fromkeys(_UNLIMITED, -1) | {
            "type": "user", "pub": {"allow": write + read}, "sub": {"allow": ["_INBOX.>"]},
        }  # fmt: skip
        return StoreUser(token(self.account, key.public, name, claims), key.seed)
