"""NATS keys and tokens: ed25519 keys in NATS's own encoding, and the JWTs that say what their holders may do.

An operator signs accounts, an account signs users, and a server that knows the operator's public key needs no list of anybody (NATS
decentralised JWT authentication). A key is one prefix byte, 32 bytes and a CRC-16 (XMODEM), in base32; a seed carries two prefix bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isles.errors import UsageError

Role = Literal["operator", "account", "user"]
_PREFIX: dict[Role, int] = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED = 18 << 3


@dataclass(frozen=True)
class Nkey:
    """An ed25519 key with a role. Its text forms are NATS's; printing it shows the public one only."""

    role: Role
    key: Ed25519PrivateKey

    @classmethod
    def new(cls, role: Role) -> Nkey:
        return cls(role, Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, text: str) -> Nkey:
        """Raises UsageError when it is no seed."""
        try:
            raw = base64.b32decode(text + "=" * (-len(text) % 8))
            body, checksum = raw[:-2], raw[-2:]
            prefix = (body[0] & 7) << 5 | body[1] >> 3
            role = next(role for role, value in _PREFIX.items() if value == prefix)
            if body[0] & 0xF8 != _SEED or len(body) != 34 or _checksum(body) != checksum:
                raise ValueError
            return cls(role, Ed25519PrivateKey.from_private_bytes(body[2:]))
        except (ValueError, IndexError, StopIteration, binascii.Error):
            raise UsageError("a secret of the run's store is damaged; ask the organiser for a new invite") from None

    @property
    def public(self) -> str:
        return _encode(bytes([_PREFIX[self.role]]) + self.key.public_key().public_bytes_raw())

    @property
    def seed(self) -> str:
        prefix = _PREFIX[self.role]
        return _encode(bytes([_SEED | prefix >> 5, (prefix & 31) << 3]) + self.key.private_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)

    def __repr__(self) -> str:
        return f"Nkey({self.role}, {self.public})"


def token(issuer: Nkey, subject: str, name: str, claims: dict[str, Any]) -> str:
    """A JWT: `issuer` says that the holder of the key `subject` is `name` and may do what `claims` say."""
    body: dict[str, Any] = {
        "iat": int(time.time()),
        "iss": issuer.public,
        "name": name,
        "sub": subject,
        "nats": claims | {"version": 2},
    }
    body["jti"] = base64.b32encode(hashlib.sha256(_compact(body)).digest()).rstrip(b"=").decode()
    text = f"{_base64(_compact({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_base64(_compact(body))}"
    return f"{text}.{_base64(issuer.sign(text.encode()))}"


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")


def _encode(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).rstrip(b"=").decode()
