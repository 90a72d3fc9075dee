"""Compiling a loop: the one way in which the rooms use numba.

No fastmath, so that NaN is seen and every machine gives the same bits; no interpreter lock, so that a thread can encode while another
sends; and the result kept on disk where there is a folder for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile at the first call, without the interpreter's lock, and keep the result on disk where numba finds a folder for it
    (NUMBA_CACHE_DIR, beside the source, the user's cache); on a read-only machine, or a full disk, compile anew in each process."""
    try:
        compiled = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # "no locator available"
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
    _forgive_a_full_disk(compiled)
    return cast(Function, compiled)


def _forgive_a_full_disk(compiled: Any) -> None:
    """Let a loop run that could be compiled but not kept. numba has no public way to say so, hence the care."""
    cache = getattr(compiled, "_cache", None)
    save = getattr(cache, "save_overload", None)
    if cache is None or save is None:
        return

    def save_if_possible(*args: Any) -> None:
        with contextlib.suppress(OSError):
            save(*args)

    cache.save_overload = save_if_possible
