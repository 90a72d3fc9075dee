"""Writing a run.toml that explains itself: every key with its unit and reason, from the descriptions of the tables.

A key that the spec does not set is written commented out at its default, so that a reader sees at a glance what this run chose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from isles.spec.tables import Spec

_WIDTH = 34


def render_spec(spec: Spec, *, head: str = "") -> str:
    """The text of a commented run.toml that reads back as `spec`."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for name, table in spec:
        doc = (type(table).__doc__ or "").strip().splitlines()
        about = f"  # {doc[0]}" if doc and doc[0] != Spec.__doc__ else ""
        lines += ["", f"[{name}]{about}"]
        given = table.model_fields_set
        lines += [_line(key, getattr(table, key), field, given=key in given) for key, field in type(table).model_fields.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def render_reference() -> str:
    """docs/spec.md: every key with its type, default and meaning, in Markdown."""
    lines = [
        "# run.toml",
        "",
        "Every key, made from the spec itself by `python -m isles.spec.template`. All have defaults but `[model]`.",
        "",
    ]
    for name, field in Spec.model_fields.items():
        table = field.annotation
        assert isinstance(table, type) and issubclass(table, BaseModel)
        about = (table.__doc__ or "").strip().splitlines()
        lines += [f"## [{name}]", "", *([about[0], ""] if about else []), "| key | default | meaning |", "| --- | --- | --- |"]
        for key, entry in table.model_fields.items():
            default = "none" if entry.default is None else _toml(entry.default)
            lines.append(f"| `{key}` | `{default}` | {(entry.description or '').replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _line(key: str, value: Any, field: Any, *, given: bool) -> str:
    shown = "..." if value is None else _toml(value)
    return f"{('' if given and value is not None else '# ') + f'{key} = {shown}':<{_WIDTH}}  # {field.description}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, BaseModel):
        return _toml(value.model_dump(exclude_none=True))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


if __name__ == "__main__":
    print(render_reference(), end="")
