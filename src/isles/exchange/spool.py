"""Chunks on disk while a round is exchanged, and the averages that are kept after it.

What an owner has received and what a cluster has got back lie in files, chunk by chunk in slots of equal size, so that memory is bounded
by the chunks in flight and not by the model. A whole average gets a manifest beside it; with that it survives a restart, can be given to
clusters that come late, and is checked chunk by chunk whenever it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from isles.codec import CHUNK_VALUES, decode, decode_accumulate
from isles.errors import MALFORMED, CheckpointError, DiskError
from isles.files import write_whole

Floats = NDArray[np.float32]

MAX_CHUNK = 1 << 30  # bytes of a chunk of an average: 256 bundled contributions in fp32 of a full chunk


def chunk_digest(data: bytes | memoryview) -> bytes:
    return blake3(data).digest()


def whole_digest(digests: list[bytes]) -> str:
    """The digest of an average: of the digests of its chunks, in order."""
    return blake3(b"".join(digests)).hexdigest()


class Spool:
    """A file of chunks. Any thread may put and get; a chunk is put once."""

    def __init__(self, path: Path, slot: int, *, keep: bool = False) -> None:
        self.path, self.slot = path, slot
        self.sizes: dict[int, int] = {}
        self.digests: dict[int, bytes] = {}
        flags = os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise DiskError(f"{path} cannot be made ({error.strerror}); give isles a folder it may write to") from error
        self._lock = threading.Lock()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self.sizes

    def put(self, chunk: int, data: bytes | memoryview, digest: bytes) -> None:
        """Raises DiskError when the disk does not take it."""
        view = memoryview(data).cast("B")
        if view.nbytes > self.slot:
            raise ValueError(f"a chunk of {view.nbytes} bytes does not fit a slot of {self.slot}")
        try:
            done = 0
            while done < view.nbytes:
                done += os.pwrite(self._file, view[done:], chunk * self.slot + done)
        except OSError as error:
            raise DiskError(
                f"{self.path} cannot be written ({error.strerror}); free some space, the round goes on then"
            ) from error
        with self._lock:
            self.digests[chunk] = digest
            self.sizes[chunk] = view.nbytes

    def get(self, chunk: int) -> bytes:
        """Raises CheckpointError when the disk does not give back what it was given."""
        data = os.pread(self._file, self.sizes[chunk], chunk * self.slot)
        if len(data) != self.sizes[chunk]:
            raise CheckpointError(
                f"{self.path} was cut short: chunk {chunk} is missing; it is fetched again from other clusters"
            )
        return data

    def sync(self) -> None:
        """Have what was put reach the disk. Raises DiskError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise DiskError(f"{self.path} cannot be written ({error.strerror}); free some space") from error

    def delete(self) -> None:
        """Remove the file. A thread may still be at work in it, so it is closed when nobody holds this object any more."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def __del__(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class Manifest:
    """What a whole average is made of. chunk, size: values; sizes, digests: of each encoded chunk. weights: of the contributions in a bundle,
    in order; empty where the owner has averaged."""

    fragment: int
    number: int
    digest: str
    chunk: int
    size: int
    sizes: tuple[int, ...]
    digests: tuple[str, ...]
    weights: tuple[float, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """A manifest that another machine or another time wrote. Raises CheckpointError."""
        try:
            raw: dict[str, Any] = json.loads(data)
            made = cls(
                fragment=int(raw["fragment"]), number=int(raw["number"]), digest=str(raw["digest"]), chunk=int(raw["chunk"]),
                size=int(raw["size"]), sizes=tuple(int(n) for n in raw["sizes"]), digests=tuple(str(d) for d in raw["digests"]),
                weights=tuple(float(w) for w in raw["weights"]),
            )  # fmt: skip
            if not 1 <= made.chunk <= CHUNK_VALUES or not len(made.sizes) == len(made.digests) == -(-made.size // made.chunk):
                raise ValueError("its chunks do not cover it")
            if (
                any(not 0 < n <= MAX_CHUNK for n in made.sizes)
                or whole_digest([bytes.fromhex(d) for d in made.digests]) != made.digest
            ):
                raise ValueError("its chunks are not what it says")
            if not all(0 <= w <= 1 for w in made.weights):
                raise ValueError("its weights are none")
        except MALFORMED as error:
            raise CheckpointError(f"the description of an average is damaged ({error}); it is fetched again") from error
        return made


class StoredAverage:
    """A whole encoded average on disk; iterating decodes it chunk by chunk, fp32."""

    def __init__(self, manifest: Manifest, spool: Spool) -> None:
        self.manifest, self.spool = manifest, spool

    def encoded(self, chunk: int) -> bytes:
        """One chunk as it travels. Raises CheckpointError when the disk has altered it."""
        data = self.spool.get(chunk)
        if chunk_digest(data).hex() != self.manifest.digests[chunk]:
            raise CheckpointError(
                f"{self.spool.path}: chunk {chunk} does not match its hash; it is fetched again from other clusters"
            )
        return data

    def __iter__(self) -> Iterator[Floats]:
        m = self.manifest
        for chunk in range(len(m.sizes)):
            count = min(m.chunk, m.size - chunk * m.chunk)
            yield decode_result(self.encoded(chunk), count, m.weights)


def decode_result(data: bytes, count: int, weights: tuple[float, ...] | list[float]) -> Floats:
    """The values of an encoded chunk of an average, fp32, shape [count]. weights: of the contributions, where it is a bundle of them."""
    if not weights:
        return decode(data, np.empty(count, np.float32))
    total = np.zeros(count, np.float32)
    for part, weight in zip(unbundle(data, len(weights)), weights, strict=True):
        decode_accumulate(part, weight, total)
    return total


def bundle(parts: list[bytes]) -> bytes:
    """Several encoded contributions as one body: each with its length before it, 4 bytes, little endian."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unbundle(data: bytes, count: int) -> list[memoryview]:
    """Undo `bundle`. Raises CheckpointError when it does not hold `count` parts."""
    view, parts, at = memoryview(data), [], 0
    for _ in range(count):
        length = int.from_bytes(view[at : at + 4], "little")
        parts.append(view[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(data):
        raise CheckpointError("a bundle of contributions is damaged; it is fetched again")
    return parts


class Averages:
    """The averages that a cluster keeps, in a folder, and finds again after a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[tuple[int, int, str], StoredAverage] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.json")):
            self._find(path)
        whole = {average.spool.path for average in self._held.values()}
        for path in folder.glob("*.spool"):  # of attempts that a kill cut off
            if path not in whole:
                path.unlink(missing_ok=True)

    def _find(self, path: Path) -> None:
        try:
            manifest = Manifest.from_json(path.read_bytes())
            spool = Spool(path.with_suffix(".spool"), manifest.sizes[0], keep=True)  # the first chunk is the largest
        except (CheckpointError, DiskError, OSError, ValueError):
            path.unlink(missing_ok=True)
            return
        spool.sizes = dict(enumerate(manifest.sizes))
        average = StoredAverage(manifest, spool)
        self._held[manifest.fragment, manifest.number, manifest.digest] = average

    def add(self, spool: Spool, fragment: int, number: int, chunk: int, size: int, weights: tuple[float, ...]) -> StoredAverage:
        """A spool holds all chunks of an average: keep it. Raises DiskError."""
        count = -(-size // chunk)
        digests = [spool.digests[i] for i in range(count)]
        manifest = Manifest(
            fragment, number, whole_digest(digests), chunk, size, tuple(spool.sizes[i] for i in range(count)),
            tuple(d.hex() for d in digests), weights,
        )  # fmt: skip
        try:
            write_whole(spool.path.with_suffix(".json"), manifest.to_json(), mode=0o600)
        except OSError as error:
            raise DiskError(
                f"{spool.path.parent} cannot be written ({error.strerror}); free some space, the round goes on then"
            ) from error
        average = StoredAverage(manifest, spool)
        self._held[fragment, number, manifest.digest] = average
        return average

    def get(self, fragment: int, number: int, digest: str) -> StoredAverage | None:
        return self._held.get((fragment, number, digest))

    def checked(self, fragment: int, number: int, digest: str) -> StoredAverage:
        """An average that the disk gives back whole, so that nothing is done with a part of it. Raises CheckpointError when it is not there, or
        the disk has altered it; it is deleted then, and can be fetched again."""
        average = self.get(fragment, number, digest)
        if average is None:
            raise CheckpointError(f"the average of round {number} of fragment {fragment} is not on this disk")
        try:
            for chunk in range(len(average.manifest.sizes)):
                average.encoded(chunk)
        except CheckpointError:
            self.drop(fragment, number, digest)
            raise
        return average

    def held(self, fragment: int) -> list[tuple[int, str]]:
        """(round, digest) of every average of a fragment, by round."""
        return sorted((number, digest) for f, number, digest in list(self._held) if f == fragment)  # threads add

    def size_since(self, fragment: int, number: int) -> int:
        """Bytes of the averages of a fragment's later rounds."""
        return sum(sum(a.manifest.sizes) for (f, n, _), a in list(self._held.items()) if f == fragment and n > number)

    def forget(self, fragment: int, before: int) -> None:
        """Delete the averages of earlier rounds."""
        for key in [k for k in list(self._held) if k[0] == fragment and k[1] < before]:
            self.drop(*key)

    def keeps(self, spool: Spool) -> bool:
        """Whether an average that is kept lies in this file."""
        return any(average.spool is spool for average in list(self._held.values()))

    def drop(self, fragment: int, number: int, digest: str) -> None:
        """Delete an average."""
        average = self._held.pop((fragment, number, digest), None)
        if average is not None:
            average.spool.path.with_suffix(".json").unlink(missing_ok=True)
            average.spool.delete()
