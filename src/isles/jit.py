"""Compiling a loop: the one way in which the rooms use numba.

No fastmath, so that NaN is seen and every machine gives the same bits; no interpreter lock, so that a thread can encode while another
sends; and the result kept on disk where there is a folder for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile at the first call, without the interpreter's lock, and keep the result on disk where numba finds a folder for it
    (NUMBA_CACHE_DIR, beside the source, the user's cache); on a read-only machine compile anew in each process."""
    try:
        return cast(Function, njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # "no locator available"
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
