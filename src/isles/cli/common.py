"""What every command shares: how errors, results and interrupts reach a person or a script."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout, everything else on stderr.")]


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value) + "\n")


class Stop:
    """Becomes true at the first Ctrl-C or SIGTERM, so that work can be saved; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        """As shells report a process that a signal ended."""
        return 128 + self.signal


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a flag while the block runs."""
    stop = Stop()

    def ask(number: int, _frame: object) -> None:
        if stop.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
