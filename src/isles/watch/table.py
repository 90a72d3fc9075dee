"""Several runs side by side, from their summaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from isles.metrics import Summary
from isles.watch.labels import run_names
from isles.watch.units import human_bytes, human_count, human_ratio, human_seconds

_HEADS = {
    "clusters": "clusters",
    "H": "H",
    "tokens": "tokens",
    "loss": "held-out loss",
    "perplexity": "perplexity",
    "gap": "gap closed",
    "sent": "sent a cluster",
    "fewer": "fewer bytes",
    "time": "time",
    "speed": "tokens/s",
}
_SHORT = {key: f"\n{head}" for key, head in _HEADS.items()} | {  # two lines each; the shorter heads stand at the bottom
    "loss": "held-out\nloss",
    "gap": "gap\nclosed",
    "sent": "sent a\ncluster",
    "fewer": "fewer\nbytes",
    "speed": "tokens\nper s",
}
# What is shown, from the widest terminal to the narrowest: the first that fits. What a comparison is for stays to the last.
_LAYOUTS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    (_HEADS, tuple(_HEADS)),
    (_HEADS, ("clusters", "H", "tokens", "loss", "gap", "sent", "fewer", "time", "speed")),
    (_SHORT, ("clusters", "H", "tokens", "loss", "gap", "sent", "fewer", "time", "speed")),
    (_SHORT, ("tokens", "loss", "gap", "sent", "fewer", "time", "speed")),
    (_SHORT, ("tokens", "loss", "gap", "sent", "fewer", "time")),
    (_SHORT, ("loss", "gap", "sent", "fewer")),
    (_SHORT, ("loss", "sent", "fewer")),
    (_SHORT, ("loss", "sent")),
)
_MARKDOWN = _LAYOUTS[1][1]


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
                "fewer_bytes": ddp.bytes / s.bytes if ddp and ddp.bytes and s.bytes else None,
            }
        )
    return rows


class ComparisonTable:
    """The rows as a table for the terminal: as many columns as its width holds, none of them cut."""

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self._rows = comparison_rows(summaries)
        self._names = run_names(summaries, with_settings=False)  # they have columns of their own, or a line below the name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=10_000)
        table = self.table(*_LAYOUTS[0])
        for heads, columns in _LAYOUTS:
            table = self.table(heads, columns)
            if table.__rich_measure__(console, unbounded).maximum <= options.max_width:
                break
        yield table

    def table(self, heads: dict[str, str], columns: Sequence[str]) -> Table:
        """The table with these columns. What has none of its own (clusters, H) stands below the run's name."""
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold", border_style="dim"
        )
        table.add_column("\nrun" if heads is _SHORT else "run", overflow="fold", max_width=36)
        for key in columns:
            table.add_column(heads[key], justify="right", no_wrap=True)
        losses = [row["held_out_loss"] for row in self._rows]
        best = min(losses) if len(losses) > 1 else None
        for row, name in zip(self._rows, self._names, strict=True):
            cells = _cells(row)
            style = "bold green" if row["held_out_loss"] == best else ""
            table.add_row(
                _run_cell(row, name, columns),
                *[Text(cells[key], style=style if key in ("loss", "perplexity") else "") for key in columns],
            )
        return table


def comparison_table(summaries: Sequence[Summary]) -> ComparisonTable:
    """The rows as a table that rich prints."""
    return ComparisonTable(summaries)


def comparison_markdown(summaries: Sequence[Summary]) -> str:
    """The same as a Markdown table."""
    lines = [["run", *(_HEADS[key] for key in _MARKDOWN)], ["---", *("--:" for _ in _MARKDOWN)]]
    for row, name in zip(comparison_rows(summaries), run_names(summaries, with_settings=False), strict=True):
        cells = _cells(row)
        lines.append([name + _stopped(row), *(cells[key] for key in _MARKDOWN)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _stopped(row: dict[str, Any]) -> str:
    return "" if row["complete"] else f" (stopped at step {row['steps']:,})"


def _run_cell(row: dict[str, Any], name: str, columns: Sequence[str]) -> Text:
    cell = Text(name)
    if "clusters" not in columns and "gap" in columns and row["method"] == "diloco":
        cell.append(f"\n{row['clusters']} clusters, H = {row['local_steps']}", style="dim")
    if not row["complete"]:
        cell.append(f"\nstopped at step {row['steps']:,}", style="yellow")
    return cell


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "clusters": str(row["clusters"]),
        "H": f"{row['local_steps']:,}" if row["method"] == "diloco" else "-",
        "tokens": human_count(row["tokens"]),
        "loss": f"{row['held_out_loss']:.4f}",
        "perplexity": f"{row['perplexity']:,.2f}" if row["perplexity"] < 1e6 else f"{row['perplexity']:.1e}",
        "gap": "-" if row["gap_closed"] is None else f"{100 * row['gap_closed']:.0f}%",
        "sent": human_bytes(row["bytes"] / row["clusters"]) if row["bytes"] else "nothing",
        "fewer": "-" if row["fewer_bytes"] is None else human_ratio(row["fewer_bytes"]),
        "time": human_seconds(row["seconds"]),
        "speed": human_count(row["tokens_per_second"]),
    }
