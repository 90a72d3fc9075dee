"""What a test internet is like: sites with their lines, and the ways between them.

seed = 1
[line]                 # of every site
up = "100Mbit"         # a second; of packets with their IP headers
down = "100Mbit"
buffer = "100ms"       # of packets that wait for the line, in time at its rate, or bytes: "256kB"
[way]                  # between every two sites
rtt = "20ms"
loss = 0.001           # of packets, each way
[sites.a]
[sites.b]
up = "20Mbit"
[ways."a b"]
rtt = "100ms"
[[events]]
at = "5s"
cut = "b"              # its line is dead
for = "5s"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

MOST = 64  # sites
NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,15}$")
QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)\s*([a-zA-Z]+)$")
RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6}
LEAST_BUFFER = 64_000  # bytes


class SpecError(ValueError):
    """A sentence that says what is wrong with a spec."""


@dataclass(frozen=True)
class Line:
    """A site's line. up, down: bytes/s. buffer: of each direction, in seconds at its rate, or bytes when it is negative."""

    up: float = 12.5e6
    down: float = 12.5e6
    buffer: float = 0.1

    def room(self, rate: float) -> float:
        """Bytes that may wait in front of a direction of this rate."""
        return -self.buffer if self.buffer < 0 else max(LEAST_BUFFER, self.buffer * rate)


@dataclass(frozen=True)
class Pair:
    """The way between two sites. rtt: seconds, there and back; loss: chance of a packet, each way."""

    rtt: float = 0.02
    loss: float = 0.0


@dataclass(frozen=True)
class Event:
    """At `at` seconds the line of site `cut` dies for `seconds`."""

    at: float
    cut: str
    seconds: float


@dataclass(frozen=True)
class Spec:
    """sites: by name. ways: by two names in order; others are `way`."""

    sites: Mapping[str, Line]
    way: Pair = Pair()
    ways: Mapping[tuple[str, str], Pair] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        if not 2 <= len(self.sites) <= MOST:
            raise SpecError(f"there are {len(self.sites)} sites; name 2 to {MOST}")
        for name in self.sites:
            if not NAME.match(name):
                raise SpecError(f"{name!r} is no name for a site; use up to 16 of a-z, 0-9 and -")
        for name in {n for pair in self.ways for n in pair} | {e.cut for e in self.events}:
            if name not in self.sites:
                raise SpecError(f"there is no site {name!r}")

    def between(self, a: str, b: str) -> Pair:
        return self.ways.get((a, b)) or self.ways.get((b, a)) or self.way

    @classmethod
    def equal(cls, count: int, line: Line, way: Pair, **more: Line) -> Spec:
        """Sites c0, c1, ... with equal lines, but for those named in `more`."""
        return cls({f"c{i}": more.get(f"c{i}", line) for i in range(count)}, way)


def load(path: Path) -> Spec:
    """Raises SpecError."""
    try:
        return parse(tomllib.loads(path.read_text()))
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is no TOML: {error}") from error


def parse(raw: Mapping[str, Any]) -> Spec:
    """Raises SpecError."""
    _known(raw, {"seed", "line", "way", "sites", "ways", "events"}, "the spec")
    line = _line(Line(), raw.get("line", {}), "[line]")
    way = _pair(Pair(), raw.get("way", {}), "[way]")
    sites = {name: _line(line, table, f"[sites.{name}]") for name, table in _table(raw.get("sites", {}), "[sites]").items()}
    ways = {}
    for key, table in _table(raw.get("ways", {}), "[ways]").items():
        names = key.split()
        if len(names) != 2 or names[0] == names[1]:
            raise SpecError(f'[ways."{key}"] must name two sites: [ways."a b"]')
        ways[names[0], names[1]] = _pair(way, table, f'[ways."{key}"]')
    events = []
    for table in raw.get("events", []):
        _known(_table(table, "[[events]]"), {"at", "cut", "for"}, "[[events]]")
        if set(table) != {"at", "cut", "for"}:
            raise SpecError("[[events]] needs at, cut and for")
        events.append(Event(_time(table["at"], "at"), str(table["cut"]), _time(table["for"], "for")))
    seed = raw.get("seed", 1)
    if not isinstance(seed, int) or seed < 0:
        raise SpecError(f"seed must be a whole number, not {seed!r}")
    return Spec(sites, way, ways, tuple(events), seed)


def _line(base: Line, table: Any, where: str) -> Line:
    _known(_table(table, where), {f.name for f in fields(Line)}, where)
    changes: dict[str, float] = {}
    for name in ("up", "down"):
        if name in table:
            changes[name] = _quantity(table[name], RATES, f"{where} {name}", "100Mbit")
    if "buffer" in table:
        text = table["buffer"]
        in_bytes = isinstance(text, str) and text.endswith("B")
        changes["buffer"] = -_quantity(text, SIZES, f"{where} buffer", "256kB") if in_bytes else _time(text, f"{where} buffer")
    return replace(base, **changes)


def _pair(base: Pair, table: Any, where: str) -> Pair:
    _known(_table(table, where), {f.name for f in fields(Pair)}, where)
    changes: dict[str, float] = {}
    if "rtt" in table:
        changes["rtt"] = _time(table["rtt"], f"{where} rtt")
    if "loss" in table:
        loss = table["loss"]
        if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < 1:
            raise SpecError(f"{where} loss must be a chance from 0 to below 1, not {loss!r}")
        changes["loss"] = float(loss)
    return replace(base, **changes)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a table")
    return value


def _known(table: Mapping[str, Any], names: set[str], where: str) -> None:
    if unknown := sorted(set(table) - names):
        raise SpecError(f"{where} has no {unknown[0]!r}; it has {', '.join(sorted(names))}")


def _time(value: Any, where: str) -> float:
    return _quantity(value, TIMES, where, "20ms")


def _quantity(value: Any, units: Mapping[str, float], where: str, example: str) -> float:
    found = QUANTITY.match(value) if isinstance(value, str) else None
    if found is None or found[2] not in units or not float(found[1]) > 0:
        raise SpecError(f'{where} must be like "{example}", not {value!r}')
    return float(found[1]) * units[found[2]]


def pairs(spec: Spec) -> list[tuple[str, str, Pair]]:
    """Every two sites, with the way between them."""
    return [(a, b, spec.between(a, b)) for a, b in combinations(spec.sites, 2)]
