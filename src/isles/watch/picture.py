"""The picture of one or several runs: held-out loss against tokens, and against the bytes that crossed the internet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isles.errors import DataError
from isles.metrics import StepRecord, Summary, read_records, read_summary
from isles.watch.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by the colour-blind.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LABELS = {"diloco": "DiLoCo", "ddp": "data-parallel", "single": "one cluster alone"}


@dataclass(frozen=True)
class RunSeries:
    """A run as it is drawn."""

    label: str
    summary: Summary
    records: tuple[StepRecord, ...]

    @property
    def measured(self) -> list[StepRecord]:
        """The records with a held-out loss."""
        return [r for r in self.records if r.held_out_loss is not None]


def load_series(folder: Path) -> RunSeries:
    """A run from its folder. Raises DataError when it has no metrics or no summary."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path} does not exist; name the --out of a finished `isles simulate`")
    summary = read_summary(folder / "summary.json")
    label = _LABELS.get(summary.method, summary.method)
    if summary.method == "diloco":
        label += f", H = {summary.local_steps}, {summary.clusters} clusters"
    return RunSeries(label, summary, tuple(read_records(path)))


def draw(runs: Sequence[RunSeries], out: Path) -> None:
    """Draw the runs into a .png or .svg. Raises DataError when the file cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "svg.hashsalt": "isles"}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
        for run, colour in zip(runs, _colours(len(runs)), strict=True):
            _draw_run(run, colour, left, right)
        left.set(xlabel="tokens trained, all clusters (millions)", ylabel="held-out loss (nats per token)")
        right.set(xlabel="bytes sent over the internet, all clusters (MiB)", xscale="log")
        if not any(r.summary.bytes for r in runs):
            right.set_xscale("linear")
        _limit(runs, left)
        right.legend(frameon=False, fontsize=9, loc="upper right")
        name = runs[0].summary.name if runs else ""
        figure.suptitle(f"{name}: {runs[0].summary.parameters:,} parameters" if runs else "", x=0.01, ha="left", fontsize=11)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else {"Software": None})
        except (OSError, ValueError) as error:
            raise DataError(f"the picture {out} cannot be written ({error}); choose a .png or .svg in a writable folder") from error
        finally:
            plt.close(figure)


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _draw_run(run: RunSeries, colour: str, left: Axes, right: Axes) -> None:
    measured = run.measured
    losses = [r.held_out_loss for r in measured if r.held_out_loss is not None]
    final = f"{run.label}: {run.summary.held_out_loss:.3f}"
    every = max(1, len(run.records) // 400)
    faint = run.records[::every]
    left.plot([r.tokens / 1e6 for r in faint], [r.loss for r in faint], color=colour, alpha=0.18, linewidth=0.8)
    left.plot([r.tokens / 1e6 for r in measured], losses, color=colour, linewidth=1.8, marker="o" if len(measured) < 15 else None, markersize=3.5)
    if run.summary.bytes:
        sent = [(r.bytes / 2**20, loss) for r, loss in zip(measured, losses, strict=True) if r.bytes]
        right.plot([x for x, _ in sent], [y for _, y in sent], color=colour, linewidth=1.8, label=f"{final}, {human_bytes(run.summary.bytes)}")
        right.plot(*[[v] for v in sent[-1]], color=colour, marker="o", markersize=5)
    elif losses:
        right.axhline(losses[-1], color=colour, linestyle="--", linewidth=1.5, label=f"{final}, sends nothing")


def _limit(runs: Sequence[RunSeries], axes: Axes) -> None:
    """Leave out the first fall from a random model, which would squeeze what is of interest."""
    losses = [r.held_out_loss for run in runs for r in run.measured if r.held_out_loss is not None]
    if losses:
        low, high = min(losses), max(losses)
        axes.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.08 * (high - low) + 1e-3)
