"""Files that are whole or not there: written beside their place, synced, and moved into it in one step."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.errors import UsageError


def write_whole(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write a file in one move: whoever reads it sees the old one or the new one, whole, after a loss of power too.

    mode: permissions of a new file, less the umask. durable: whether it must outlive a loss of power. Raises OSError; the old file is then as it
    was, or the new one is in its place but a loss of power may bring the old one back."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        try:
            sync(path.parent)  # the name, too, must be on the disk
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs no folders
                raise


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(path: Path, lock: str | None = None) -> Iterator[None]:
    """Keep other processes from working in a folder meanwhile. lock: a file in it to do that by, the folder itself when left out.

    Raises UsageError when another process does."""
    where = path if lock is None else path / lock
    handle = os.open(where, os.O_RDONLY if lock is None else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(f"another process is at work in {path}; wait for it, or choose another folder") from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)
