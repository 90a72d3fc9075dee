"""A checkpoint on its way to this disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from isles.errors import MALFORMED, DiskError
from isles.exchange.spool import chunk_digest
from isles.exchange.state import CHUNK, HASH, Offer
from isles.files import write_whole

KEPT = 4  # lists of hashes that are remembered as wrong


class Partial:
    """A file that comes in chunks, and beside it a note of which have come. digest: of the whole that they are part of; empty: of none.
    wrong: digests of lists of hashes whose chunks did not make up their whole."""

    def __init__(self, path: Path) -> None:
        self.path, self._note = path, path.with_suffix(".coming")
        self.digest, self.held, self.wrong = "", set[int](), list[str]()
        try:
            raw: Any = json.loads(self._note.read_bytes())
            self.wrong = [str(digest) for digest in raw["wrong"]][-KEPT:]
            if path.exists():
                self.digest, self.held = str(raw["digest"]), {int(chunk) for chunk in raw["held"]}
        except (OSError, *MALFORMED):
            pass

    def begin(self, offer: Offer) -> None:
        """Go on with what has come of this one, or begin anew. Raises DiskError."""
        if offer.digest != self.digest:
            self.forget()
            self.digest = offer.digest

    def note(self) -> None:
        """Write down what has come; after a loss of power it may say too much, and the hash of the whole tells. Raises DiskError."""
        try:
            record = {"digest": self.digest, "held": sorted(self.held), "wrong": self.wrong[-KEPT:]}
            write_whole(self._note, json.dumps(record).encode(), mode=0o600, durable=False)
        except OSError as error:
            raise self._refused(error) from error

    def open(self) -> int:
        """Raises DiskError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._refused(error) from error

    def write(self, file: int, chunk: int, body: bytes) -> None:
        """Raises DiskError."""
        try:
            if os.pwrite(file, body, chunk * CHUNK) != len(body):
                raise OSError(28, os.strerror(28))
        except OSError as error:
            raise self._refused(error) from error

    def damaged(self, hashes: bytes) -> set[int]:
        """The chunks on disk that do not match their hashes."""
        with self.path.open("rb") as file:
            found = [chunk_digest(file.read(CHUNK)) for _ in range(len(hashes) // HASH)]
        return {chunk for chunk, digest in enumerate(found) if digest != hash_at(hashes, chunk)}

    def forget(self) -> None:
        """Nothing has come."""
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self.digest, self.held = "", set()

    def _refused(self, error: OSError) -> DiskError:
        return DiskError(f"{self.path} cannot be written ({error.strerror}); free some space, joining goes on then")


def hash_at(hashes: bytes, chunk: int) -> bytes:
    """The hash of a chunk in a list of them."""
    return hashes[chunk * HASH : (chunk + 1) * HASH]
