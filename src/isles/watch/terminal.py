"""What a run looks like in a terminal while it goes on: loss, speed, bytes, time left.

Fed with the run's records. On a terminal a live panel is redrawn a few times a second, whatever the number of records; elsewhere (a
log file, CI) a plain line is printed at a held-out evaluation, at most one a second and at least one a minute.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from isles.metrics import StepRecord
from isles.spec import Spec
from isles.watch.labels import METHODS
from isles.watch.panel import RunView, prepare_text, run_panel, sparkline
from isles.watch.units import human_bytes, human_count, human_seconds

__all__ = ["PrepareDisplay", "RunDisplay", "sparkline"]

_REFRESH = 0.25  # seconds between redraws
_PLAIN = 1.0  # seconds between plain lines, at the least
_PLAIN_LATEST = 60.0  # seconds after which a plain line comes without an evaluation, so that a log shows life
_PLAIN_PREPARING = 10.0  # seconds between plain lines while text is prepared, so that little text makes none
_WINDOW = 240  # samples that the speed is taken over: about a minute of quick steps, or so many slow ones
_SETTLED = 2.0  # seconds of samples before they say more of the speed than the whole run does
_METHODS = {"none": "diloco"}
_NEVER = float("-inf")


class _Screen:
    """A live area that is replaced whole, from the caller's thread. Off a terminal, or when quiet, there is none."""

    def __init__(self, quiet: bool, console: Console | None) -> None:
        self.console = console or Console(stderr=True)
        self.plain = not quiet and not self.console.is_terminal
        self._live: Live | None = None
        if not quiet and self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self.unicode = self.console.encoding.startswith("utf")
        self.shown = time.monotonic() if self.plain else _NEVER

    @property
    def live(self) -> bool:
        return self._live is not None

    def due(self, after: float) -> bool:
        return time.monotonic() - self.shown >= after

    def show(self, content: RenderableType) -> None:
        if self._live:
            self.shown = time.monotonic()
            self._live.update(content, refresh=True)

    def line(self, text: str) -> None:
        """A line that stays; above the live area where there is one."""
        self.shown = time.monotonic()
        self.console.print(text if self.unicode else text.replace("·", "-"), soft_wrap=True, markup=False, highlight=False)

    def start(self) -> None:
        if self._live:
            self._live.start()

    def stop(self) -> None:
        if self._live:
            self._live.stop()


class _Shown:
    """A display is entered before it shows anything and leaves the terminal clean, whatever happens inside."""

    _screen: _Screen

    def __enter__(self) -> Self:
        self._screen.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._screen.stop()


class RunDisplay(_Shown):
    """Shows runs one after another. `begin` announces one, `update` feeds it; `prepare` shows the data being made."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._screen = _Screen(quiet, console)
        self._view: RunView | None = None
        self._speed = Speed()

    def begin(self, name: str, spec: Spec, *, baseline: str = "none", number: int = 1, of: int = 1) -> None:
        """A new run. number, of: its place in a session of several."""
        method = _METHODS.get(baseline, baseline)
        self._view = RunView(
            name=name,
            method=METHODS.get(method, method),
            local_steps=spec.train.local_steps_at if method == "diloco" else None,
            codec=spec.codec.name if method == "diloco" else "",
            place=f"run {number} of {of}" if of > 1 else "",
            steps=spec.run.steps,
            clusters=1 if method == "single" else spec.clusters.count,
        )
        self._speed = Speed()
        self._screen.show(run_panel(self._view, None, self._screen.console.width, self._screen.unicode))
        self._screen.shown = time.monotonic() if self._screen.plain else _NEVER

    def update(self, record: StepRecord) -> None:
        """Take a record; redraws when it is time to."""
        view = self._view
        if self._quiet or view is None:
            return
        if record.held_out_loss is not None:
            view.held_out.append(record.held_out_loss)
        self._speed.add(record)
        last = record.step >= view.steps
        if self._screen.live:
            if last or self._screen.due(_REFRESH):
                self._rates(view, record)
                self._screen.show(run_panel(view, record, self._screen.console.width, self._screen.unicode))
            if last and view.place:  # the panel goes on with the next run; this one's end stays to be read
                self._screen.line(self._end(view, record))
        elif last or self._screen.due(_PLAIN if record.held_out_loss is not None else _PLAIN_LATEST):
            self._rates(view, record)
            self._screen.line(self._line(view, record))

    def prepare(self, progress: object) -> None:
        """Progress of data preparation: anything with bytes_done, bytes_total, documents and tokens."""
        _show_preparing(self._screen, progress)

    def _rates(self, view: RunView, record: StepRecord) -> None:
        view.token_rate, view.step_rate = self._speed.rates(record)

    def _end(self, view: RunView, record: StepRecord) -> str:
        """What is left of a run on the terminal while the session's next one goes on."""
        held_out = f"held-out {view.held_out[-1]:.4f}  " if view.held_out else ""
        return f"{view.title(record.step, 38)}  {held_out}{_sent(record)}  in {human_seconds(record.seconds)}"

    def _line(self, view: RunView, record: StepRecord) -> str:
        done = record.step >= view.steps
        held_out = f"held-out {view.held_out[-1]:.4f}  " if view.held_out else ""
        end = f"in {human_seconds(record.seconds)}" if done else f"{human_seconds(view.left(record))} left"
        round_ = f"round {record.round:,}  " if view.local_steps else ""
        return (
            f"{view.title(record.step)}  step {record.step:,} of {view.steps:,}  {round_}loss {record.loss:.4f}  {held_out}"
            f"{human_count(view.token_rate)} tokens/s  {_sent(record)}  {end}"
        )


def _sent(record: StepRecord) -> str:
    return f"{human_bytes(record.bytes)} sent" if record.bytes else "nothing sent"


class Speed:
    """Tokens and steps a second of late, from the records as they come in.

    Until there is enough to go by, the training time that the records themselves carry is used: it is there from the first record on,
    and in a resumed run it is the earlier parts' speed."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)  # wall time, tokens, step

    def add(self, record: StepRecord) -> None:
        now = time.monotonic()
        if not self._samples or now - self._samples[-1][0] >= _REFRESH:
            self._samples.append((now, record.tokens, record.step))

    def rates(self, record: StepRecord) -> tuple[float, float]:
        """Tokens and steps a second; 0 while nothing is known."""
        now = time.monotonic()
        then, tokens, step = self._samples[0] if self._samples else (now, record.tokens, record.step)
        if now - then >= _SETTLED and record.step > step:
            return (record.tokens - tokens) / (now - then), (record.step - step) / (now - then)
        if record.seconds > 0:
            return record.tokens / record.seconds, record.step / record.seconds
        return 0.0, 0.0


class PrepareDisplay(_Shown):
    """Progress of `isles data prepare`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._screen = _Screen(quiet, console)

    def update(self, progress: object) -> None:
        """Anything with bytes_done, bytes_total, documents and tokens."""
        _show_preparing(self._screen, progress)


def _show_preparing(screen: _Screen, progress: object) -> None:
    if screen.live and screen.due(_REFRESH):
        screen.show(prepare_text(progress, screen.console.width, screen.unicode))
    elif screen.plain and screen.due(_PLAIN_PREPARING):
        screen.line(prepare_text(progress, 200, screen.unicode).plain)
