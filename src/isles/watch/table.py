"""Several runs side by side, from their summaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from isles.metrics import Summary
from isles.watch.units import human_bytes, human_count, human_seconds

_NAMES = {"diloco": "DiLoCo", "ddp": "data-parallel", "single": "one cluster alone"}


def comparison_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Every summary's fields, with what only a comparison can say.

    perplexity: exp of the held-out loss, per token; gap_closed: share of the way from one cluster alone to data-parallel (None without
    both); fewer_bytes: data-parallel's bytes over this run's (None without data-parallel, or where nothing was sent)."""
    ddp = next((s for s in summaries if s.method == "ddp"), None)
    single = next((s for s in summaries if s.method == "single"), None)
    gap = single.held_out_loss - ddp.held_out_loss if single and ddp else 0.0
    rows = []
    for s in summaries:
        closed = (single.held_out_loss - s.held_out_loss) / gap if single and gap > 0 else None
        rows.append(
            asdict(s)
            | {
                "perplexity": math.exp(min(s.held_out_loss, 700.0)),
                "gap_closed": closed,
                "fewer_bytes": ddp.bytes / s.bytes if ddp and s.bytes else None,
            }
        )
    return rows


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("run", no_wrap=True)
    for name in ("clusters", "H", "tokens", "held-out loss", "gap closed", "sent a cluster", "fewer bytes", "time", "tokens/s"):
        table.add_column(name, justify="right")
    for row in comparison_rows(summaries):
        table.add_row(*_cells(row))
    return table


def comparison_markdown(summaries: Sequence[Summary]) -> str:
    """The same as a Markdown table."""
    head = ["run", "clusters", "H", "tokens", "held-out loss", "gap closed", "sent a cluster", "fewer bytes", "time", "tokens/s"]
    lines = [head, ["---"] * len(head), *(_cells(row) for row in comparison_rows(summaries))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    name = _NAMES.get(row["method"], row["method"]) + ("" if row["complete"] else f" (stopped at step {row['steps']:,})")
    return [
        name,
        str(row["clusters"]),
        str(row["local_steps"]) if row["method"] == "diloco" else "-",
        human_count(row["tokens"]),
        f"{row['held_out_loss']:.4f}",
        "-" if row["gap_closed"] is None else f"{100 * row['gap_closed']:.0f}%",
        human_bytes(row["bytes"] / row["clusters"]),
        "-" if row["fewer_bytes"] is None else f"{row['fewer_bytes']:.0f}x",
        human_seconds(row["seconds"]),
        human_count(row["tokens_per_second"]),
    ]
