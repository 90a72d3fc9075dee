"""The clusters of a run side by side, live: what each says of itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from isles.watch.units import human_bytes, human_count

SILENT = 5.0  # seconds after which a status is old


def clusters_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """rows: the status of each cluster, empty where it has said nothing yet."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title or None,
        title_justify="left",
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    table.add_column("cluster", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "round", "loss", "tok/s", "stall", "exch.", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    for row in rows:
        if row.get("trouble"):
            table.caption = f"{row['cluster']}: {row['trouble']}"
    return table


def run_table(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    """A run's clusters under what the run has come to. summary: run, name, step, steps, rounds."""
    rounds = sum(summary["rounds"])
    title = f"{summary['name'] or 'run'} {summary['run']}: step {summary['step']:,} of {summary['steps']:,}, {rounds:,} rounds"
    return clusters_table(rows, title)


def _cells(row: Mapping[str, Any]) -> list[str | Text]:
    if "age" not in row and not row.get("time"):
        return [str(row.get("cluster", "")), Text("starting", "dim"), *[""] * 7]
    silent = float(row["age"]) if "age" in row else time.time() - float(row["time"])
    state = str(row["state"])
    style = {"active": "green", "finished": "bold green", "joining": "yellow", "leaving": "yellow"}.get(state, "")
    shown = Text(state, style)
    if silent > (row.get("patience") or SILENT) and state not in ("finished", "leaving"):
        shown = Text(f"silent {silent:.0f} s", "red")
    elif not row.get("connected", True):
        shown = Text(f"{state}, no store", "red")
    seconds = float(row.get("trained_seconds") or 0.0)
    tokens, step = int(row.get("tokens", 0)), int(row.get("step", 0))
    stalled = f"{100 * float(row.get('stalled', 0.0)) / seconds:.1f}%" if seconds else "-"
    exchange = [s for s in row.get("exchange_seconds", []) if s]
    return [
        str(row["cluster"]),
        shown,
        f"{step:,}",
        str(sum(row.get("rounds", []))),
        f"{row['loss']:.4f}" if "loss" in row else "-",
        human_count(tokens / seconds) if seconds else "-",
        stalled,
        f"{max(exchange):.2f} s" if exchange else "-",
        human_bytes(row.get("bytes_up", 0)),
    ]
