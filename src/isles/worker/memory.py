"""What the agent and its workers share: one mapped file with two fp32 vectors of the model's size.

    globals   the global parameters; the agent writes them, when no worker reads
    sent      what the cluster handed off; the workers write it, and then leave it alone until the round is merged

A file in the run's folder and not shared memory of the system, which containers cap at 1 GiB; it also outlives either side's crash. Its blocks
are allocated when it is made, so that a full disk is a sentence then and not a killed process later.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isles.errors import DiskError

Floats = NDArray[np.float32]


class SharedParameters:
    """The two vectors, fp32, shape [total] each; views of the same file in every process that opens it. Raises DiskError."""

    def __init__(self, path: Path, total: int, *, create: bool = False) -> None:
        self.path, self.total = path, total
        size = 2 * 4 * total
        try:
            descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
            try:
                if create and os.fstat(descriptor).st_size != size:
                    os.ftruncate(descriptor, 0)
                    os.posix_fallocate(descriptor, 0, size)
                actual = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                path.unlink(missing_ok=True)
                raise DiskError(
                    f"{path.parent} has no room for the {size / 2**30:.1f} GiB that agent and workers share; free some"
                ) from error
            raise DiskError(f"{path}, which agent and workers share, cannot be opened ({error.strerror})") from error
        if actual != size:
            raise DiskError(
                f"{path} has {actual} bytes instead of {size}: it is of another model; remove it, the agent makes it anew"
            )
        whole: Floats = np.memmap(path, np.float32, "r+", shape=(2 * total,)).view(np.ndarray)
        self.globals, self.sent = whole[:total], whole[total:]
