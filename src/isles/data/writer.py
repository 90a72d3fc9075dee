"""Writing a dataset so that no crash, not even kill -9, leaves one that looks whole.

Three rules. A shard is written under a name that ends in `.partial` and gets its own name only when every shard is complete
and fsynced. index.json, without which nothing is a dataset, is written last, and renamed into place. And a folder being
written carries a lock file, `.preparing`, from before the first byte to after the last: what an interrupted run left is
recognised by it and removed by the next run, while files that isles did not write are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from isles.data.index import INDEX_NAME, TOKENIZER_FOLDER, DatasetIndex, ShardInfo, Split, is_dataset_index
from isles.data.tokenizer import Tokenizer
from isles.errors import DataError
from isles.files import sync

PARTIAL = ".partial"
LOCK_NAME = ".preparing"
_LOCK_TEXT = (
    "isles data prepare is writing here, or was interrupted. Run it again: it starts cleanly and removes what was left.\n"
)
_SHARD_FILE = re.compile(r"^(train|held_out)-\d{5,}\.bin(\.partial)?$")
_OWN_FILES = {INDEX_NAME + PARTIAL}
_OWN_FOLDERS = {TOKENIZER_FOLDER, TOKENIZER_FOLDER + PARTIAL}
_HASH_BLOCK = 1 << 22


class ShardWriter:
    """One split's tokens into shards of `shard_tokens`, under partial names until `publish`."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._sizes: list[int] = []  # tokens in each shard
        self._hashers: list[Any] = []  # blake3 of each; None when the shard was shortened and must be read again
        self._file: IO[bytes] | None = None  # the last shard, while it is open
        self.tokens = 0

    def append(self, ids: NDArray[Any]) -> None:
        """Add token ids (integers, [n]) to the stream."""
        data = ids.astype(self._dtype)
        while data.size:
            room = self._shard_tokens - self._sizes[-1] if self._sizes else 0
            if room <= 0:
                self._close()
                self._sizes.append(0)
                self._hashers.append(blake3())
                room = self._shard_tokens
            if self._file is None:
                self._file = self._partial(len(self._sizes) - 1).open("ab", buffering=1 << 20)
            piece = data[:room]
            raw = piece.tobytes()
            self._file.write(raw)
            if self._hashers[-1] is not None:
                self._hashers[-1].update(raw)
            self._sizes[-1] += piece.size
            self.tokens += piece.size
            data = data[piece.size :]

    def tail(self, count: int) -> NDArray[Any]:
        """A copy of the last `count` tokens."""
        self._close()
        pieces: list[NDArray[Any]] = []
        shard = len(self._sizes) - 1
        while count > 0:
            taken = min(count, self._sizes[shard])
            offset = (self._sizes[shard] - taken) * self._dtype.itemsize
            pieces.append(np.fromfile(self._partial(shard), dtype=self._dtype, offset=offset))
            count, shard = count - taken, shard - 1
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, self._dtype)

    def drop_tail(self, count: int) -> None:
        """Remove the last `count` tokens."""
        self._close()
        self.tokens -= count
        while count > 0:
            taken = min(count, self._sizes[-1])
            self._sizes[-1] -= taken
            count -= taken
            path = self._partial(len(self._sizes) - 1)
            if self._sizes[-1]:
                os.truncate(path, self._sizes[-1] * self._dtype.itemsize)
                self._hashers[-1] = None
            else:
                path.unlink()
                self._sizes.pop()
                self._hashers.pop()

    def publish(self) -> list[ShardInfo]:
        """Give every shard its own name. Call when all shards of all splits are complete: see `complete`."""
        shards = []
        for i, (size, hasher) in enumerate(zip(self._sizes, self._hashers, strict=True)):
            name = self._name(i)
            self._partial(i).replace(self._folder / name)
            shards.append(ShardInfo(file=name, split=self._split, tokens=size, blake3=hasher.hexdigest()))
        return shards

    def complete(self) -> None:
        """Everything on disk (each shard is fsynced when it is full) and every hash known."""
        self._close()
        for i, hasher in enumerate(self._hashers):
            if hasher is None:
                self._hashers[i] = _hash_file(self._partial(i))

    def close(self) -> None:
        """Let go of the open file, whatever state it is in."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # a full disk fails the flush once more
                file.close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _name(self, shard: int) -> str:
        return f"{self._split}-{shard:05d}.bin"

    def _partial(self, shard: int) -> Path:
        return self._folder / (self._name(shard) + PARTIAL)


def publish(folder: Path, index: DatasetIndex, tokenizer: Tokenizer, writers: list[ShardWriter]) -> DatasetIndex:
    """Turn complete partial files into a dataset. Whatever moment it is killed at, index.json exists only for a whole one."""
    for writer in writers:
        writer.complete()
    saved = folder / (TOKENIZER_FOLDER + PARTIAL)
    tokenizer.save(saved)
    for path in saved.rglob("*"):
        sync(path)
    (folder / INDEX_NAME).unlink(missing_ok=True)  # of the dataset that this one replaces
    sync(folder)
    _remove(folder, partial=False)
    index = index.model_copy(update={"shards": tuple(shard for writer in writers for shard in writer.publish())})
    saved.replace(folder / TOKENIZER_FOLDER)
    sync(folder)
    partial = folder / (INDEX_NAME + PARTIAL)
    partial.write_text(index.to_json(), encoding="utf-8")
    sync(partial)
    partial.replace(folder / INDEX_NAME)
    sync(folder)
    return index


@contextmanager
def claimed_folder(folder: Path, *, force: bool) -> Iterator[None]:
    """Hold `folder` for writing a dataset: made when missing, leftovers of an interrupted run removed, locked meanwhile.

    On any exception inside, what was written is removed. DataError: a finished dataset is there and not `force`, another
    process is writing, or files with our names lie there that no run of isles left.
    """
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DataError(f"{folder} is, or lies in, a file; name a folder for the dataset") from None
    lock, interrupted = _lock(folder)
    try:
        os.write(lock, _LOCK_TEXT.encode())
        os.fsync(lock)
        finished = _is_finished(folder, interrupted=interrupted)
        if interrupted:
            _remove_unfinished(folder)
        if finished and not force:
            raise DataError(f"{folder} already holds a finished dataset; choose another folder, or force overwriting it")
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_unfinished(folder)
            raise
    finally:
        (folder / LOCK_NAME).unlink(missing_ok=True)
        os.close(lock)
        if created:
            with contextlib.suppress(OSError):  # not empty: it succeeded
                folder.rmdir()


def _is_finished(folder: Path, *, interrupted: bool) -> bool:
    """Whether a dataset's index is there. DataError when files in the way are not ours to remove."""
    index = folder / INDEX_NAME
    if index.exists():
        if not is_dataset_index(index):
            raise DataError(f"{index} is not of an isles dataset; move it away or choose another folder for the dataset")
        return True
    if not interrupted:
        for path in sorted(folder.iterdir()):
            if _is_own(path):
                raise DataError(
                    f"{path} is in the way, and nothing shows that `isles data prepare` made it; move it away or choose "
                    "another folder"
                )
    return False


def _lock(folder: Path) -> tuple[int, bool]:
    """Take the folder's lock: a descriptor that holds it until closed, and whether an interrupted run had left it."""
    path = folder / LOCK_NAME
    while True:
        left = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(
                f"another `isles data prepare` is writing {folder}; wait for it, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks: the mark still works, only two runs at once are not told apart
        try:
            # A holder removes the file before it lets go: the same file still there means that its holder was killed.
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor, left
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _is_own(path: Path) -> bool:
    name = path.name
    return bool(_SHARD_FILE.match(name)) or name in _OWN_FILES or (name in _OWN_FOLDERS and path.is_dir())


def _remove(folder: Path, *, partial: bool) -> None:
    """Remove our partial files, or our published shards and tokenizer."""
    for path in list(folder.iterdir()):
        if _is_own(path) and path.name.endswith(PARTIAL) == partial:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _remove_unfinished(folder: Path) -> None:
    """Remove all of a dataset that has no index; beside a finished one, only what is partial."""
    _remove(folder, partial=True)
    if not (folder / INDEX_NAME).exists():
        _remove(folder, partial=False)


def _hash_file(path: Path) -> Any:
    hasher = blake3()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            hasher.update(block)
    return hasher
