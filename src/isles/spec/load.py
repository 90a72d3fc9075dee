"""Reading run.toml: TOML in, a checked Spec out, and every mistake in one sentence with the nearest right name."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from isles.errors import SpecError
from isles.spec.tables import Spec

MAX_BYTES = 1 << 20  # a run.toml is a few KiB; anything this large is another file


def load_spec(path: Path | str, overrides: Sequence[str] = ()) -> Spec:
    """Read a run.toml and apply overrides such as `train.local_steps=50`. Raises SpecError."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path} is larger than a run.toml can be; is it another file?")
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
    except FileNotFoundError as error:
        raise SpecError(f"{path} does not exist; `isles init {path.parent}` writes one") from error
    except IsADirectoryError as error:
        raise SpecError(f"{path} is a folder; name the run.toml in it") from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and thousands of brackets
        raise SpecError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    return spec_from(tables, overrides, source=str(path))


def spec_from(tables: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "the spec") -> Spec:
    """A Spec from nested tables (as TOML or JSON give them) and `table.key=value` overrides. Raises SpecError."""
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tables.items()}
    for override in overrides:
        table, key, value = _parse_override(override)
        if not isinstance(merged.setdefault(table, {}), dict):
            raise SpecError(f"--set {override}: {table} in {source} is no table")
        merged[table][key] = value
    try:
        return Spec.model_validate(merged)
    except ValidationError as error:
        raise SpecError(_explain(error, source)) from error


def _parse_override(text: str) -> tuple[str, str, Any]:
    name, equals, raw = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and table and key):
        raise SpecError(f"--set {text!r} must read table.key=value, for example train.local_steps=50")
    try:
        return table, key, tomllib.loads(f"v = {raw.strip()}")["v"]
    except (ValueError, RecursionError):
        return table, key, raw.strip()  # a bare word is a string, so that no shell quoting is needed


def _explain(error: ValidationError, source: str) -> str:
    """The first problem as one sentence, with the number of further ones."""
    problems = error.errors()
    # An unknown key is the likeliest root of the others (a misspelt required field is also "missing").
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        text = f"{where} is not a key that isles knows{_nearest(first['loc'])}"
    elif first["type"] == "missing":
        text = f"{where} is missing"
    elif first["type"] == "value_error":
        text = f"{where + ': ' if where else ''}{first['ctx']['error']}"
    else:
        text = f"{where} = {first['input']!r} does not fit: {first['msg'][0].lower()}{first['msg'][1:]}"
    return f"{source}: {text}{more}"


def _nearest(location: tuple[int | str, ...]) -> str:
    known = _keys_at(Spec, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    elsewhere = [f"{t}.{location[-1]}" for t, f in Spec.model_fields.items() if location[-1] in _keys_at(Spec, (t,))]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(known)}"


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)
