"""An invite: everything that a host needs to join a run, in one file or one line.

It holds secrets of one cluster, so the file is readable by its owner only, and a command line should be given the file and not the line.
The line is `isles1-` and base64url of compressed JSON with a checksum, so that one that was cut on its way is known at once.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from isles.errors import UsageError
from isles.files import write_whole
from isles.identity.authority import NAME, Authority, StoreUser
from isles.identity.certificates import Certified

PREFIX = "isles1-"
MAX_LINE = 1 << 16
MAX_JSON = 1 << 18
ANOTHER = "ask the organiser for a new invite"


@dataclass(frozen=True)
class Invite:
    """run: its id. cluster: the name that was given. store: URLs of the store's members. authority: the run's certificate. spec: digest of the
    run's spec, which the store must show."""

    run: str
    cluster: str
    store: tuple[str, ...]
    authority: str
    certified: Certified
    user: StoreUser
    spec: str

    @classmethod
    def issue(cls, authority: Authority, cluster: str, store: tuple[str, ...], spec: str) -> Invite:
        """Raises UsageError for a name that no cluster can have."""
        certified = authority.certify(cluster)
        return cls(authority.run, cluster, store, authority.certified.certificate, certified, authority.admit(cluster), spec)

    def to_line(self) -> str:
        packed = zlib.compress(json.dumps(asdict(self), separators=(",", ":")).encode(), 9)
        return PREFIX + base64.urlsafe_b64encode(packed + zlib.crc32(packed).to_bytes(4, "big")).rstrip(b"=").decode()

    @classmethod
    def from_text(cls, text: str) -> Invite:
        """An invite from its line, whitespace in it ignored. Raises UsageError: cut, altered, of another version, or no invite."""
        line = "".join(text.split())
        if len(line) > MAX_LINE or not line.startswith("isles"):
            raise UsageError(f"this is no invite: it should begin with {PREFIX}; paste all of the line, or {ANOTHER}")
        if not line.startswith(PREFIX):
            raise UsageError(
                f"this invite is of another version of isles ({line[:8]}); use the version of the organiser, or {ANOTHER}"
            )
        try:
            raw = base64.urlsafe_b64decode(line[len(PREFIX) :] + "=" * (-len(line[len(PREFIX) :]) % 4))
            packed, checksum = raw[:-4], raw[-4:]
            if zlib.crc32(packed).to_bytes(4, "big") != checksum:
                raise ValueError
            unpacker = zlib.decompressobj()
            return cls._parse(unpacker.decompress(packed, MAX_JSON))
        except (ValueError, binascii.Error, zlib.error, KeyError, TypeError):
            raise UsageError(f"this invite was cut or altered on its way; paste all of the line, or {ANOTHER}") from None

    @classmethod
    def _parse(cls, data: bytes) -> Invite:
        record: Any = json.loads(data)
        texts = [record[name] for name in ("run", "cluster", "authority", "spec")]
        store = tuple(record["store"])
        secret = [*record["certified"].values(), *record["user"].values()]
        if not all(isinstance(text, str) for text in [*texts, *store, *secret]) or not NAME.match(record["cluster"]):
            raise ValueError
        certified, user = Certified(**record["certified"]), StoreUser(**record["user"])
        return cls(record["run"], record["cluster"], store, record["authority"], certified, user, record["spec"])

    def save(self, path: Path) -> None:
        """Write the invite's file, readable by its owner only. Raises UsageError."""
        try:
            write_whole(path, self.to_line().encode() + b"\n", mode=0o600)
        except OSError as error:
            raise UsageError(f"the invite cannot be written to {path} ({error.strerror}); choose another file") from error

    @classmethod
    def load(cls, path: Path) -> Invite:
        """Raises UsageError."""
        try:
            with path.open("rb") as file:
                return cls.from_text(file.read(MAX_LINE + 1).decode(errors="replace"))
        except OSError as error:
            raise UsageError(
                f"the invite {path} cannot be read ({error.strerror}); name the file that the organiser sent"
            ) from error

    def check_dates(self, now: dt.datetime | None = None) -> None:
        """Raises UsageError when the certificate is not valid by this machine's clock, and says what that clock shows."""
        certificate = x509.load_pem_x509_certificate(self.certified.certificate.encode())
        now = now or dt.datetime.now(dt.UTC)
        shown = f"{now:%Y-%m-%d %H:%M} UTC"
        if now < certificate.not_valid_before_utc:
            raise UsageError(
                f"this machine's clock shows {shown}, before the invite was made ({certificate.not_valid_before_utc:%Y-%m-%d}); set the clock"
            )
        if now > certificate.not_valid_after_utc:
            raise UsageError(
                f"the invite was valid until {certificate.not_valid_after_utc:%Y-%m-%d} and this machine's clock shows {shown}; set the clock, or {ANOTHER}"
            )

    def __repr__(self) -> str:
        return f"Invite({self.run}, {self.cluster})"
