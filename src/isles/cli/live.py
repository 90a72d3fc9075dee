"""A table that is drawn in place on a terminal, and now and then as text where there is none."""

from __future__ import annotations

import time
from types import TracebackType

from rich.live import Live
from rich.table import Table

from isles.cli.common import err

PLAIN = 10.0  # seconds between two tables where nobody draws in place, as in a log


class LiveTable:
    """Context manager; shown: False for --quiet."""

    def __init__(self, *, shown: bool = True) -> None:
        self._live = Live(console=err, auto_refresh=False) if shown and err.is_terminal else None
        self._plain, self._next, self._last = shown and not err.is_terminal, 0.0, None  # type: bool, float, Table | None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        if self._plain and self._last is not None:
            err.print(self._last)

    def update(self, table: Table) -> None:
        if self._live is not None:
            self._live.update(table, refresh=True)
        elif self._plain:
            self._last = table
            if time.monotonic() >= self._next:
                self._next, self._last = time.monotonic() + PLAIN, None
                err.print(table)
