"""How the live panel is laid out: lines of text that fit the terminal's width. Cheap to make: it is made while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from rich import box
from rich.panel import Panel
from rich.text import Text

from isles.metrics import StepRecord
from isles.watch.units import human_bytes, human_count, human_seconds

_BARS = "▁▂▃▄▅▆▇█"
_WIDEST = 100  # columns; a wider panel is no easier to read
_NAME = 15  # columns of a row's name
_VALUE = 14  # columns of its first figure, where there is room for more beside it
_SPARK = 24  # evaluations that the row of bars shows


@dataclass
class RunView:
    """What the display knows of the run besides its newest record."""

    name: str
    method: str
    local_steps: Callable[[int], int] | None  # H at a step; None where there are no rounds
    codec: str
    place: str  # 'run 2 of 3', or nothing
    steps: int
    clusters: int
    held_out: list[float] = field(default_factory=list)
    token_rate: float = 0.0
    step_rate: float = 0.0

    def left(self, record: StepRecord) -> float:
        """Seconds to the run's end; infinite while the speed is not known."""
        steps = self.steps - record.step
        return steps / self.step_rate if self.step_rate else inf if steps else 0.0

    def title(self, step: int, width: int = 10_000) -> str:
        """What is running, in at most `width` columns: what matters less is left out first, and a long name is cut."""
        local_steps = f", H = {self.local_steps(step):,}" if self.local_steps else ""
        codec = f", {self.codec}" if self.codec else ""
        place = f" · {self.place}" if self.place else ""
        head = f"{self.name}: {self.method}"
        for title in (head + local_steps + codec + place, head + local_steps + place, head + place):
            if len(title) <= width:
                return title
        room = width - len(place) - len(self.method) - 3
        return f"{self.name[:room]}…: {self.method}{place}" if room > 3 else f"{self.method}{place}"[: max(0, width)]


def sparkline(values: Sequence[float], width: int = _SPARK) -> str:
    """A row of bars, the last `width` values, scaled to their own range. What is not finite is left blank."""
    shown = values[max(0, len(values) - width) :]
    finite = [v for v in shown if isfinite(v)]
    if not finite:
        return " " * len(shown)
    low, span = min(finite), max(finite) - min(finite)
    level = (len(_BARS) - 1) / span if span else 0.0
    return "".join(_BARS[round((v - low) * level)] if isfinite(v) else " " for v in shown)


def run_panel(view: RunView, record: StepRecord | None, width: int, unicode: bool = True) -> Panel:
    """The panel of a run at its newest record, or before the first one."""
    width = min(width, _WIDEST)
    inner = width - 4
    lines = [Text("starting", style="dim")] if record is None else _lines(view, record, inner, unicode)
    body = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
    title = view.title(record.step if record else 0, inner - 2)
    return Panel(
        body,
        title=Text(title if unicode else title.replace("·", "-").replace("…", "~"), style="bold"),
        title_align="left",
        width=width,
        border_style="dim",
        box=box.ROUNDED if unicode else box.ASCII,
    )


def _lines(view: RunView, record: StepRecord, width: int, unicode: bool) -> list[Text]:
    left = human_seconds(view.left(record))
    rows: list[tuple[str, str, list[str]]] = []
    if view.held_out:
        bars = sparkline(view.held_out, min(_SPARK, max(0, width - _NAME - _VALUE))) if unicode else ""
        rows.append(("held-out loss", f"{view.held_out[-1]:.4f}", [bars]))
    else:
        rows.append(("held-out loss", "not measured yet", []))
    rows.append(("training loss", f"{record.loss:.4f}", [f"learning rate {record.lr:.2e}"]))
    rows.append(("tokens", human_count(record.tokens), [f"{human_count(view.token_rate)} a second"]))
    share = f"{human_bytes(record.bytes / view.clusters)} a cluster"
    rows.append(
        ("internet", f"{human_bytes(record.bytes)} sent", [share]) if record.bytes else ("internet", "nothing sent", [])
    )
    training = (
        f"{record.clusters} training" if record.clusters >= view.clusters else f"{record.clusters} of {view.clusters} training"
    )
    rows.append(("clusters", training, [f"round {record.round:,}"] if view.local_steps else []))
    return [_progress(f"step {record.step:,} of {view.steps:,}", record.step / view.steps, f"{left} left", width, unicode)] + [
        _row(name, value, more, width) for name, value, more in rows
    ]


def _row(name: str, value: str, more: list[str], width: int) -> Text:
    """A named figure, and of the others as many as fit whole."""
    line = Text(name.ljust(_NAME), style="dim")
    line.append(value, style="not dim bold")
    used = _NAME + max(_VALUE, len(value) + 2)
    for text in more:
        if text and used + len(text) <= width:
            line.append(" " * (used - len(line)) + text, style="not dim")
            used = len(line) + 2
    return line


def _progress(head: str, share: float, tail: str, width: int, unicode: bool) -> Text:
    """'step 40 of 100  ━━━━━━──────  40%  0:12 left', over the whole width; the bar gives way first."""
    share = min(1.0, max(0.0, share))
    percent = f"{int(100 * share):3d}%"
    room = width - len(head) - len(percent) - len(tail) - 6
    if room < 5:
        return Text(f"{head}  {tail}" if len(head) + len(tail) + 2 <= width else head)
    full = round(share * room)
    line = Text(f"{head}  ")
    line.append(("━" if unicode else "#") * full, style="cyan")
    line.append(("─" if unicode else ".") * (room - full), style="bright_black")
    line.append(f"  {percent}  {tail}")
    return line


def prepare_text(progress: object, width: int, unicode: bool = True) -> Text:
    """One line of data preparation: anything with bytes_done, bytes_total, documents and tokens."""
    done, total = getattr(progress, "bytes_done", 0), getattr(progress, "bytes_total", 0)
    documents, tokens = getattr(progress, "documents", 0), getattr(progress, "tokens", 0)
    size = f"{human_bytes(done)} of {human_bytes(total)}" if total else human_bytes(done)
    facts = [size, f"{human_count(documents)} documents", f"{human_count(tokens)} tokens"]
    while len(facts) > 1 and len("preparing text") + sum(2 + len(fact) for fact in facts) > width - 16:
        facts.pop()
    tail = "  ".join(facts)
    line = (
        _progress("preparing text", done / total, tail, min(width, _WIDEST), unicode)
        if total
        else Text(f"preparing text  {tail}")
    )
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
