"""What every command shares: how errors, results and interrupts reach a person or a script."""

from __future__ import annotations

import codecs
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

MAX_SENTENCE = 1000  # characters; a mistake may quote a value that is a whole file


class _Console(Console):
    """A console for text that people wrote: names are printed as they are, brackets and colons are no markup."""

    def __init__(self, file: Any = None) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Stderr:
    """sys.stderr, whatever it is at the moment. When it cannot take more (its reader left, its disk is full), the work goes on."""

    @property
    def _stream(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich puts itself in between while a display is live

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text)) if self._stream else 0
        except OSError:
            forget(self._stream)
            return 0

    def flush(self) -> None:
        try:
            if self._stream:
                self._stream.flush()
        except OSError:
            forget(self._stream)

    def isatty(self) -> bool:
        return bool(self._stream) and bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"


err = _Console(_Stderr())
out = _Console()

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout, everything else on stderr.")]


def path_given(text: str) -> Path:
    """A path from the command line. An empty one is a shell variable that was not set, not the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; write . for the current folder")
    if "\0" in text:
        raise typer.BadParameter("a path cannot hold a zero byte")
    return Path(text)


def print_json(value: Any) -> None:
    """One JSON object on stdout. What is no finite number becomes null, as JSON has none."""
    if sys.stdout is not None:  # closed by the shell: `isles ... >&-`
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        try:
            sys.stdout.write(json.dumps(_finite(plain), allow_nan=False) + "\n")
        except BrokenPipeError:
            raise BrokenPipeError from None  # without a number, which typer would take for its own


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def say(text: str) -> None:
    """A line of result on stdout."""
    out.print(text, soft_wrap=True)


def complain(text: str) -> None:
    """A mistake as one line on stderr."""
    line = " ".join(text.split())
    if len(line) > MAX_SENTENCE:
        line = f"{line[: MAX_SENTENCE // 2]} ... {line[-MAX_SENTENCE // 2 :]}"
    err.print(Text.assemble(("error:", "bold red"), " ", line), soft_wrap=True)


def command_line(words: Sequence[str | Path]) -> str:
    """A command that a shell reads back as `words`."""
    return shlex.join(str(word) for word in words)


def as_argument(path: Path) -> str:
    """A path that no parser takes for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _print_anyway(error: UnicodeError) -> tuple[str | bytes, int]:
    """Characters that the terminal's encoding lacks: bytes of file names as they came, others escaped. Printing never fails."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def print_any_character() -> None:
    """Let stdout and stderr take every character, whatever the locale."""
    codecs.register_error("isles", _print_anyway)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="isles")


def flush() -> None:
    """Hand over what was printed, so that a full disk or a closed pipe is noticed while it can still be said."""
    if sys.stdout is not None:
        sys.stdout.flush()


def forget(stream: Any) -> None:
    """After a failed write: send what is left, and what is still to come, nowhere; the interpreter would try again when it ends."""
    with suppress(OSError, AttributeError, ValueError):  # the stream may be no file
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


def open_standard_files() -> None:
    """A shell can close stdout (`>&-`); the next file that is opened would take its number, and every message would go into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


class Stopped(Exception):
    """Work was left because a signal asked for it. The text says what is kept and how to go on."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Stop:
    """Becomes true at the first Ctrl-C, SIGTERM or SIGHUP, so that work can be saved; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        return bool(self.signal)

    def check(self, text: str) -> None:
        """Leave work that cannot be saved half way: raises Stopped with this text once a signal has come."""
        if self.signal:
            raise Stopped(text, self.exit_code)

    @property
    def exit_code(self) -> int:
        """As shells report a process that a signal ended."""
        return 128 + self.signal


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag while the block runs."""
    stop = Stop()

    def ask(number: int, _frame: object) -> None:
        if stop.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
