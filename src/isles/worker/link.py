"""What an agent and its workers say to each other: JSON lines over a socket in the cluster's folder.

Rank 0 speaks for all workers. Nothing is lost when a line is: on every connection the worker first says how it stands (`Hello`), and
the agent goes on from there. So the agent may be restarted under its workers, and they under it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Union

from pydantic import TypeAdapter, ValidationError

from isles.errors import NetworkError

MAX_LINE = 1 << 20
OVER = "the run is over"  # reason of a Stop, by which a script knows that there is no more to come
SOCKET_NAME = "agent.sock"
_LONGEST = 100  # bytes of a socket's path that every system takes

Range = tuple[int, int]


@dataclass(frozen=True)
class Flight:
    """A fragment that was handed off and is not merged: after which local step, with how many tokens, and which samples."""

    step: int
    tokens: int
    ranges: tuple[Range, ...] = ()
    released: bool = False  # the workers have set their progress since then apart


@dataclass(frozen=True)
class Hello:
    """How the workers stand. fresh: they hold nothing yet and wait for Start. merged: the last round merged, of each fragment. saved: the rounds
    that a saved state of theirs goes with, if there is one; kept: the samples trained in it that are in no round. taken: claims received."""

    pid: int
    ranks: int
    layout: str
    fresh: bool
    step: int
    merged: tuple[int, ...] = ()
    flights: dict[int, Flight] = field(default_factory=dict)
    released: tuple[int, ...] = ()
    saved: tuple[int, ...] | None = None
    kept: tuple[Range, ...] = ()
    taken: int = 0


@dataclass(frozen=True)
class Stepped:
    """A local step is done. seconds: it took, waiting included; stalled: of these, waiting for a round."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    stalled: float


@dataclass(frozen=True)
class HandedOff:
    fragment: int
    flight: Flight


@dataclass(frozen=True)
class Released:
    fragment: int


@dataclass(frozen=True)
class Merged:
    fragment: int
    round: int


@dataclass(frozen=True)
class Need:
    """The workers will soon need claim `number` (from 1), of `count` stream positions."""

    number: int
    count: int


@dataclass(frozen=True)
class Stopped:
    """finished: the run's last step is done and merged."""

    step: int
    finished: bool


@dataclass(frozen=True)
class Start:
    """Begin at a step of the run. resume: from the saved state; else from the global parameters, with a warm-up of so many steps. rounds: applied,
    of each fragment. busy: fragments of which an earlier process's contribution is still under way. taken: claims given so far."""

    step: int
    resume: bool
    warmup: int
    rounds: tuple[int, ...]
    busy: tuple[int, ...] = ()
    taken: int = 0


@dataclass(frozen=True)
class Claim:
    number: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Release:
    """The global parameters are about to change by a round that the workers' progress is not in: set it apart."""

    fragment: int


@dataclass(frozen=True)
class Merge:
    """Round `round` is in the global parameters. late: the workers' progress was set apart for it (Release). landed: what was handed off is
    in it. step: of the participant that was furthest on, 0 when it is not known."""

    fragment: int
    round: int
    late: bool
    landed: bool
    step: int = 0


@dataclass(frozen=True)
class Stop:
    """Save and end. reason: for the log."""

    reason: str


FromWorker = Union[Hello, Stepped, HandedOff, Released, Merged, Need, Stopped]  # noqa: UP007
FromAgent = Union[Start, Claim, Release, Merge, Stop]  # noqa: UP007
Message = FromWorker | FromAgent
_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (Hello, Stepped, HandedOff, Released, Merged, Need, Stopped, Start, Claim, Release, Merge, Stop)
}


def to_line(message: Message) -> bytes:
    return json.dumps({type(message).__name__: asdict(message)}).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """Raises NetworkError when it is no message."""
    try:
        ((kind, content),) = json.loads(line).items()
        message: Message = _KINDS[kind].validate_python(content)
    except (ValueError, KeyError, AttributeError, ValidationError) as error:
        raise NetworkError(
            f"agent and workers do not understand each other ({str(error)[:200]}); run the same isles for both"
        ) from error
    return message


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path for a socket that the system takes, however long the real one is."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="isles-") as folder:
        (Path(folder) / "d").symlink_to(path.parent.resolve())
        yield f"{folder}/d/{path.name}"


class AgentLink:
    """The workers' end. Blocking; a lost connection is made again, and `hello` says then how the workers stand."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SOCKET_NAME
        self._socket: socket.socket | None = None
        self._buffer = b""

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def connect(self, hello: Hello) -> bool:
        """Try once. Returns whether there is a connection."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self.path) as path:
                made.connect(path)
            made.sendall(to_line(hello))
        except OSError:
            made.close()
            return False
        self._socket, self._buffer = made, b""
        return True

    def send(self, message: FromWorker) -> None:
        """Say something, if anybody is there; what is lost with the connection is said again by Hello."""
        if self._socket is not None:
            try:
                self._socket.sendall(to_line(message))
            except OSError:
                self._drop()

    def receive(self, seconds: float) -> list[FromAgent]:
        """What the agent has said; waits up to `seconds` for the first message. Raises NetworkError when it is none."""
        if self._socket is None:
            time.sleep(min(seconds, 0.1))
            return []
        messages = self._split()
        deadline = time.monotonic() + seconds
        while not messages:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return []
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._drop()
                return []
            self._buffer += data
            messages = self._split()
        return messages

    def _split(self) -> list[FromAgent]:
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MAX_LINE:
            raise NetworkError("the agent sends a message without end; run the same isles for agent and workers")
        return [from_line(line) for line in lines]  # type: ignore[misc]

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def close(self) -> None:
        self._drop()
