"""What a run looks like in a terminal while it goes on: loss, speed, bytes, time left.

Fed with the run's records. On a terminal a live panel is redrawn a few times a second, whatever the number of records; elsewhere (a
log file, CI) a plain line is printed at every held-out evaluation, at most one a second.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from isles.metrics import StepRecord
from isles.spec import Spec
from isles.watch.units import human_bytes, human_count, human_seconds

_BARS = "▁▂▃▄▅▆▇█"
_REFRESH = 0.2  # seconds between redraws
_PLAIN = 1.0  # seconds between plain lines
TITLES = {"none": "DiLoCo", "ddp": "data-parallel", "single": "one cluster alone"}


def sparkline(values: list[float], width: int = 24) -> str:
    """A row of bars, the last `width` values, scaled to their own range."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0] for v in shown)


class RunDisplay:
    """Shows runs one after another. `begin` announces one, `update` feeds it; `prepare` shows the data being made."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._quiet = quiet
        self._live: Live | None = None
        self._title, self._steps, self._clusters = "", 0, 0
        self._held_out: list[float] = []
        self._rates: deque[tuple[float, int, int]] = deque(maxlen=200)  # wall time, tokens, step
        self._drawn = 0.0
        self._last: StepRecord | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def begin(self, name: str, spec: Spec, *, baseline: str = "none", number: int = 1, of: int = 1) -> None:
        """A new run. number, of: its place in a session of several."""
        place = f"  ·  run {number} of {of}" if of > 1 else ""
        self._title = f"{name}: {TITLES[baseline]}, H = {spec.train.local_steps}, {spec.codec.name}{place}" if baseline == "none" else f"{name}: {TITLES[baseline]}{place}"
        self._steps, self._clusters = spec.run.steps, 1 if baseline == "single" else spec.clusters.count
        self._held_out, self._last = [], None
        self._rates.clear()
        self._drawn = 0.0

    def update(self, record: StepRecord) -> None:
        """Take a record; redraws when it is time to."""
        if self._quiet:
            return
        now = time.monotonic()
        self._last = record
        self._rates.append((now, record.tokens, record.step))
        if record.held_out_loss is not None:
            self._held_out.append(record.held_out_loss)
        last = record.step >= self._steps
        if self._live and (last or now - self._drawn >= _REFRESH):
            self._drawn = now
            self._live.update(self._render(record), refresh=True)
        elif not self._live and (last or (record.held_out_loss is not None and now - self._drawn >= _PLAIN)):
            self._drawn = now
            self._console.print(self._line(record), soft_wrap=True, markup=False)

    def prepare(self, progress: object) -> None:
        """Progress of data preparation: anything with bytes_done, bytes_total, documents and tokens."""
        if self._live and time.monotonic() - self._drawn >= _REFRESH:
            self._drawn = time.monotonic()
            self._live.update(_prepare_text(progress), refresh=True)

    def _speed(self) -> tuple[float, float]:
        """Tokens and steps a second over the last records."""
        (t0, tokens0, step0), (t1, tokens1, step1) = self._rates[0], self._rates[-1]
        return ((tokens1 - tokens0) / (t1 - t0), (step1 - step0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)

    def _render(self, record: StepRecord) -> Panel:
        tokens_rate, step_rate = self._speed()
        left = human_seconds((self._steps - record.step) / step_rate) if step_rate else "?"
        bar = Progress(TextColumn("step {task.completed:,.0f} of {task.total:,.0f}"), BarColumn(bar_width=None), TextColumn("{task.percentage:3.0f}%"), TextColumn(f"{left} left"), expand=True)
        bar.add_task("", total=self._steps, completed=record.step)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        held_out = f"{self._held_out[-1]:.4f}  {sparkline(self._held_out)}" if self._held_out else "not measured yet"
        grid.add_row("held-out loss", held_out)
        grid.add_row("training loss", f"{record.loss:.4f}   learning rate {record.lr:.2e}")
        grid.add_row("tokens", f"{human_count(record.tokens)}   {human_count(tokens_rate)}/s")
        grid.add_row("internet", f"{human_bytes(record.bytes)} in all, {human_bytes(record.bytes / self._clusters)} a cluster")
        grid.add_row("clusters", f"{record.clusters} training   round {record.round}")
        return Panel(Group(bar, grid), title=self._title, title_align="left", width=min(self._console.width, 100))

    def _line(self, record: StepRecord) -> str:
        held_out = f"held-out {self._held_out[-1]:.4f}  " if self._held_out else ""
        return (
            f"{self._title}  step {record.step}/{self._steps}  round {record.round}  loss {record.loss:.4f}  {held_out}"
            f"{human_count(self._speed()[0])} tokens/s  {human_bytes(record.bytes)} sent"
        )


class PrepareDisplay:
    """Progress of `isles data prepare`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if not quiet and self._console.is_terminal else None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, progress: object) -> None:
        now = time.monotonic()
        if self._live and now - self._drawn >= _REFRESH:
            self._drawn = now
            self._live.update(_prepare_text(progress), refresh=True)


def _prepare_text(progress: object) -> Progress:
    done, total = getattr(progress, "bytes_done", 0), getattr(progress, "bytes_total", None)
    tokens, documents = getattr(progress, "tokens", 0), getattr(progress, "documents", 0)
    of = f" of {human_bytes(total)}" if total else ""
    bar = Progress(TextColumn("preparing text"), BarColumn(), TextColumn(f"{human_bytes(done)}{of}   {human_count(documents)} documents   {human_count(tokens)} tokens"))
    bar.add_task("", total=total or None, completed=done)
    return bar
