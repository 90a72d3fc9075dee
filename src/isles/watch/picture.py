"""The picture of one or several runs: held-out loss against tokens, and against the bytes that crossed the internet."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.errors import DataError
from isles.files import write_whole
from isles.metrics import StepRecord, Summary, read_records, read_summary
from isles.watch.labels import method_name, run_names, settings
from isles.watch.units import human_bytes, human_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by the colour-blind, without its yellow, which white paper swallows. The baselines are grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (6, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.5, 1.5)))  # when the colours have all been used
_BASELINES = {"ddp": "#222222", "single": "#888888"}
_QUIET = "#555555"
_FAINT_RUNS = 4  # more runs than this, and their training losses would hide each other
_FAINT_POINTS = 60  # the training loss is averaged into so many points
_START = 0.3  # share of a run whose loss need not be seen: the fall from a random model would squeeze what is of interest
_PANEL, _HEIGHT = 4.3, 4.6  # inches of one panel, its ticks included
_LABEL = 0.36  # inches that a run's label is high
_NAME, _FIGURE = 0.095, 0.074  # inches that a letter of a label's name and of its second line takes at most, about
_LONGEST = 40  # letters of a name; more would be more label than picture
_MARGIN = 1.2  # inches of title and axis labels above and below a panel
_TICKS = 0.14  # share of the axis that two ticks of bytes are apart at least, so that their labels do not touch
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": _QUIET,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "svg.hashsalt": "isles",  # or the identifiers inside would differ from one drawing to the next
}


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

    @property
    def points(self) -> list[tuple[int, int, float]]:
        """Tokens, bytes and held-out loss wherever it was measured, the run's end included."""
        points = [(r.tokens, r.bytes, r.held_out_loss) for r in self.records if r.held_out_loss is not None]
        end = (self.summary.tokens, self.summary.bytes, self.summary.held_out_loss)
        return (
            points if points and points[-1][0] >= end[0] else [*points, end]
        )  # an interrupted run is measured once more, for its summary


def load_series(folder: Path) -> RunSeries:
    """A run from its folder. Raises DataError when it has no metrics or no summary."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path} does not exist; name the --out of a finished `isles simulate`")
    summary = read_summary(folder / "summary.json")
    return RunSeries(method_name(summary.method), summary, tuple(read_records(path)))


def draw(runs: Sequence[RunSeries], out: Path) -> None:
    """Draw the runs into a .png or .svg; the same records give the same bytes. Raises DataError when the file cannot be written."""
    kind = out.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise DataError(f"the picture {out} is neither a .png nor a .svg; give it one of these endings")
    if not runs:
        raise DataError(f"there is no run to draw into {out}; name at least one run's folder")
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the person's own matplotlibrc says
        mpl.rcParams.update(_STYLE)
        figure = _figure(runs)
        content = io.BytesIO()
        # Without the date and the version, so that the bytes depend on the records alone.
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, content.getvalue())
    except OSError as error:
        raise DataError(f"the picture {out} cannot be written ({error}); choose a file in a writable folder") from error


def _figure(runs: Sequence[RunSeries]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sent = any(run.summary.bytes for run in runs)
    labels = _labels(runs)
    height = max(_HEIGHT, _MARGIN + _LABEL * len(runs))
    width = (2 if sent else 1.3) * _PANEL + max(max(_NAME * len(name), _FIGURE * len(figures)) for name, figures in labels)
    figure = Figure(figsize=(round(width, 1), height), layout="constrained")
    FigureCanvasAgg(figure)  # not through pyplot, which would change the backend of a notebook that calls this
    panels = figure.subplots(1, 2 if sent else 1, sharey=True, squeeze=False)[0]
    styles = _styles(runs)
    for run, (colour, dash) in zip(runs, styles, strict=True):
        _draw_tokens(run, colour, dash, panels[0], faint=len(runs) <= _FAINT_RUNS)
        if sent:
            _draw_bytes(run, colour, dash, panels[1])
    faint = "; faint: training loss" if len(runs) <= _FAINT_RUNS else ""
    panels[0].set(xlabel=f"tokens trained, all clusters{faint}", ylabel="held-out loss, nats per token")
    panels[0].xaxis.set_major_formatter(lambda value, _: human_count(value))
    panels[0].set_xlim(left=0)
    low, high = _limits(runs)
    panels[0].set_ylim(low, high)
    if sent:
        _byte_axis(panels[1], runs, high)
    _label_runs(panels[-1], [run.summary.held_out_loss for run in runs], labels, styles, height - _MARGIN)
    figure.suptitle(_title(runs), x=0.012, ha="left", fontsize=12, fontweight="bold")
    return figure


def _title(runs: Sequence[RunSeries]) -> str:
    names, sizes = {r.summary.name for r in runs}, {r.summary.parameters for r in runs}
    name = names.pop() if len(names) == 1 else f"{len(runs)} runs"
    return f"{name}: {sizes.pop():,} parameters" if len(sizes) == 1 else name


def _styles(runs: Sequence[RunSeries]) -> list[tuple[str, Any]]:
    """A colour and a dash for each run: grey for the first of each baseline, and no two runs the same."""
    styles: list[tuple[str, Any]] = []
    free, left = 0, dict(_BASELINES)
    for run in runs:
        grey = left.pop(run.summary.method, None)
        if grey:
            styles.append((grey, "-"))
        else:
            styles.append((_COLOURS[free % len(_COLOURS)], _DASHES[free // len(_COLOURS) % len(_DASHES)]))
            free += 1
    return styles


def _draw_tokens(run: RunSeries, colour: str, dash: Any, axes: Axes, *, faint: bool) -> None:
    if faint:
        tokens, losses = _averaged(run.records)
        axes.plot(tokens, losses, color=colour, alpha=0.25, linewidth=0.8, zorder=1)
    points = run.points
    x, y = [p[0] for p in points], [p[2] for p in points]
    axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.9, marker="o" if len(points) < 15 else None, markersize=3.5)
    axes.plot(x[-1], y[-1], color=colour, marker="o", markersize=5.5)


def _draw_bytes(run: RunSeries, colour: str, dash: Any, axes: Axes) -> None:
    points = [p for p in run.points if p[1]]  # a logarithmic axis has no place for what was measured before the first byte
    end = run.summary.held_out_loss
    if not points:  # its loss, for comparison, at any number of bytes
        axes.axhline(end, color=colour, linestyle=(0, (5, 3)), linewidth=1.5, zorder=1.5)
        return
    x, y = [p[1] for p in points], [p[2] for p in points]
    axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.9, marker="o" if len(points) < 15 else None, markersize=3.5)
    axes.plot(x[-1], y[-1], color=colour, marker="o", markersize=5.5)


def _averaged(records: Sequence[StepRecord]) -> tuple[list[float], list[float]]:
    """The training loss in at most _FAINT_POINTS means of neighbouring records: single batches are mostly noise."""
    size = max(1, math.ceil(len(records) / _FAINT_POINTS))
    groups = [records[i : i + size] for i in range(0, len(records), size)]
    return [g[-1].tokens for g in groups], [sum(r.loss for r in g) / len(g) for g in groups]


def _byte_axis(axes: Axes, runs: Sequence[RunSeries], top: float) -> None:
    """A logarithmic axis with ticks that read as bytes do: 1 MiB, 10 MiB, 100 MiB, 1 GiB. top: the highest loss that is shown."""
    seen = [p[1] for run in runs for p in run.points if p[1] and p[2] <= top]
    low, high = min(seen) / 1.3, max(seen) * 1.3
    axes.set(xscale="log", xlabel="bytes sent over the internet, all clusters", xlim=(low, high))
    ticks = byte_ticks(low, high)
    axes.set_xticks(ticks, [human_bytes(t).replace(".0 ", " ") for t in ticks])
    axes.set_xticks([], minor=True)


def byte_ticks(low: float, high: float) -> list[float]:
    """Round numbers of bytes between the limits, as many as leave room for their labels on a logarithmic axis."""
    fine = [m * 10**e for e in range(3) for m in (1, 1.5, 2, 3, 4, 5, 6, 8)]
    ticks: list[float] = []
    for steps in (fine, (1, 2, 5, 10, 20, 50, 100, 200, 500), (1, 3, 10, 30, 100, 300), (1, 10, 100), (1, 30), (1,)):
        ticks = [
            step * 1024.0**unit for unit in range(6) for step in steps if step < 1000 and low <= step * 1024.0**unit <= high
        ]
        if all(math.log(b / a) >= _TICKS * math.log(high / low) for a, b in pairwise(ticks)):
            break
    return ticks or [math.sqrt(low * high)]


def _limits(runs: Sequence[RunSeries]) -> tuple[float, float]:
    """The losses to show: every run's from shortly after its start on, and where it ends."""
    shown = []
    for run in runs:
        points = run.points
        late = [p[2] for p in points if p[0] >= _START * run.summary.tokens]
        shown += late if len(points) >= 8 else [p[2] for p in points]
    low, high = min(shown), max(shown)
    span = max(high - low, 0.02 * abs(high), 1e-3)
    return low - 0.06 * span, high + 0.06 * span


def _labels(runs: Sequence[RunSeries]) -> list[tuple[str, str]]:
    """Two lines for each run: its name, and its figures with those settings that its name does not say."""
    names = run_names([run.summary for run in runs])
    if len(set(names)) < len(runs) and len({run.label for run in runs}) == len(runs):
        names = [run.label for run in runs]
    labels = []
    for run, name in zip(runs, names, strict=True):
        s = run.summary
        facts = [f"{s.held_out_loss:.3f}", f"{human_bytes(s.bytes)} sent" if s.bytes else "sends nothing"]
        if s.method == "diloco" and settings(s) not in name:
            facts.append(settings(s))
        if not s.complete:
            facts.append(f"stopped at step {s.steps:,}")
        labels.append((name if len(name) <= _LONGEST else f"{name[:20]}…{name[21 - _LONGEST :]}", " · ".join(facts)))
    return labels


def _label_runs(
    axes: Axes, losses: Sequence[float], labels: Sequence[tuple[str, str]], styles: Sequence[tuple[str, Any]], room: float
) -> None:
    """Each run's label at the right edge, at the height where the run ends, moved apart where they would touch.

    room: inches that the axes are high, about."""
    bottom, top = axes.get_ylim()
    ends = [min(max((loss - bottom) / (top - bottom), 0.0), 1.0) for loss in losses]
    places = spread(ends, min(_LABEL / room, 1 / len(ends)))
    for (name, figures), (colour, dash), end, at in zip(labels, styles, ends, places, strict=True):
        line: dict[str, Any] = {"transform": axes.transAxes, "color": colour, "clip_on": False}
        axes.plot([1.0, 1.03], [end, at], linewidth=0.8, alpha=0.7, **line)
        axes.plot([1.03, 1.085], [at, at], linewidth=1.9, linestyle=dash, **line)
        place: dict[str, Any] = {"xycoords": axes.transAxes, "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(name, (1.1, at), (0, 1), va="bottom", color=colour, fontsize=10, fontweight="bold", **place)
        axes.annotate(figures, (1.1, at), (0, -1), va="top", color=_QUIET, fontsize=8.5, **place)


def spread(places: Sequence[float], distance: float) -> list[float]:
    """The places, from 0 to 1, moved as little as need be to stand at least `distance` apart, in the same order.

    The distance must leave room for all of them."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [places[i] for i in order]
    for _ in range(50 * len(moved)):  # neighbours push each other apart by halves until all have their room
        before = list(moved)
        for i in range(len(moved) - 1):
            short = distance - (moved[i + 1] - moved[i])
            if short > 0:
                moved[i], moved[i + 1] = moved[i] - short / 2, moved[i + 1] + short / 2
        moved = [min(max(place, 0.0), 1.0) for place in moved]
        if max((abs(a - b) for a, b in zip(before, moved, strict=True)), default=0.0) < 1e-4:
            break
    result = [0.0] * len(places)
    for i, place in zip(order, moved, strict=True):
        result[i] = place
    return result
