"""The display: whole lines at any width, a plain log where there is no terminal, silence when asked, and next to no time of training."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isles.metrics import StepRecord
from isles.spec import Spec, spec_from
from isles.watch import PrepareDisplay, RunDisplay, sparkline, terminal
from isles.watch.panel import RunView, prepare_text, run_panel

NARROW = 40


@dataclass
class Prepared:
    """As the data room reports it."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


class Clock:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "time", made)
    return made


@pytest.fixture(scope="module")
def spec() -> Spec:
    return spec_from(
        {
            "run": {"steps": 100},
            "model": {"family": "gpt2", "parameters": "0.13M"},
            "data": {"inputs": ["text"]},
            "clusters": {"count": 4},
            "train": {"local_steps": 10},
            "codec": {"name": "int4"},
        }
    )


def record(step: int, held_out: float | None = None, seconds: float | None = None) -> StepRecord:
    return StepRecord(
        step, step // 10, step * 1000, 2.5, held_out, step * 1000, 1e-3, 0.5, 4, step * 0.5 if seconds is None else seconds
    )


def console(width: int = 80, *, is_terminal: bool = True, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=file, force_terminal=is_terminal, width=width, height=30, color_system=None, legacy_windows=False)


def text(of: Console) -> str:
    assert isinstance(of.file, io.TextIOWrapper)
    buffer = of.file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(of.file.encoding)


def view(**changes: object) -> RunView:
    made = RunView("demo", "DiLoCo", lambda _: 10, "int4", "run 2 of 3", 2_000_000, 4, [2.9, 2.7, 2.6], 8230.0, 8.2)
    return replace(made, **changes)  # type: ignore[arg-type]


def panel(of: RunView, at: StepRecord | None, width: int, unicode: bool = True) -> list[str]:
    out = console(width, encoding="utf-8" if unicode else "ascii")
    out.print(run_panel(of, at, width, unicode))
    return text(out).splitlines()


HUGE = StepRecord(1_999_999, 199_999, 999_000_000_000_000, 2.54321, None, 2**52, 4e-4, 1.0, 3, 9e6)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("at", [record(1), record(1234, 2.5), HUGE], ids=["first", "usual", "huge"])
@pytest.mark.parametrize("name", ["demo", "n" * 64], ids=["short", "long"])
def test_the_panel_is_whole_at_any_width(width: int, at: StepRecord, name: str) -> None:
    lines = panel(view(name=name), at, width)
    assert len(lines) == 8
    assert {len(line) for line in lines} == {min(width, 100)}
    assert all(line[0] in "│╭╰" and line[-1] in "│╮╯" for line in lines)
    assert not any("…" in line for line in lines[1:])  # a long name may be cut; a figure may not
    assert "run 2 of 3" in lines[0]
    body = "\n".join(lines)
    for shown in ("held-out loss", "training loss", "tokens", "internet", "clusters", f"{at.loss:.4f}"):
        assert shown in body


def test_80_columns_show_every_figure() -> None:
    body = "\n".join(panel(view(), record(1234), 80))
    for shown in (
        "demo: DiLoCo, H = 10, int4 · run 2 of 3", "step 1,234 of 2,000,000", "67:42:32 left", "2.6000", "█▃▁", "1.00e-03",
        "1.23M", "8.23K a second", "1.2 MiB sent", "301.3 KiB a cluster", "4 training", "round 123",
    ):  # fmt: skip
        assert shown in body


def test_a_run_without_rounds_shows_none_and_one_that_sends_nothing_says_so() -> None:
    alone = view(method="one cluster alone", local_steps=None, codec="", place="", clusters=1)
    body = "\n".join(panel(alone, replace(record(5), bytes=0, clusters=1), 80))
    assert "demo: one cluster alone ─" in body
    assert "nothing sent" in body
    assert "round" not in body


def test_clusters_that_stand_still_are_counted() -> None:
    assert "3 of 4 training" in "\n".join(panel(view(), replace(record(5), clusters=3), 80))


def test_h_in_the_title_is_that_of_the_step() -> None:
    grows = view(local_steps=lambda step: 10 if step < 50 else 1000)
    assert "H = 10," in panel(grows, record(49), 80)[0]
    assert "H = 1,000," in panel(grows, record(50), 80)[0]


def test_a_terminal_that_knows_ascii_alone_gets_ascii_alone() -> None:
    body = "\n".join(panel(view(name="n" * 64), record(1234), 80, unicode=False))
    assert body.isascii()
    assert "run 2 of 3" in body


def test_the_display_writes_what_the_terminals_encoding_holds(spec: Spec) -> None:
    out = console(encoding="ascii")
    with RunDisplay(console=out) as display:
        display.begin("demo", spec, number=1, of=2)
        for step in range(1, 101):
            display.update(record(step, held_out=2.0 + 1 / step))
    assert "step 100 of 100" in text(out)


def test_something_is_shown_before_the_first_record(spec: Spec) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        assert "demo: DiLoCo, H = 10, int4" in text(out)
        assert "starting" in text(out)


def test_a_quick_run_is_redrawn_a_few_times_a_second_and_at_its_end(spec: Spec, clock: Clock) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        for step in range(1, 101):
            clock.now += 0.01
            display.update(record(step))
    drawn = text(out).count("training loss")
    assert 4 <= drawn <= 6
    assert "step 100 of 100" in text(out)


def test_the_panel_leaves_the_terminal_clean(spec: Spec) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        display.update(record(1))
    after = text(out).rsplit("╯", 1)[1]
    assert after.count("\x1b[2K") == 8 or after.count("\x1b[1A\x1b[2K") >= 7  # every line of the panel is wiped


def test_the_ends_of_a_sessions_runs_stay_to_be_read(spec: Spec) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("diloco", spec, number=1, of=3)
        display.update(record(100, held_out=2.25))
        display.begin("ddp", spec, baseline="ddp", number=2, of=3)
    assert "diloco: DiLoCo, H = 10 · run 1 of 3  held-out 2.2500  97.7 KiB sent  in 0:50" in text(out)
    assert "ddp: data-parallel · run 2 of 3" in text(out)


def test_one_run_by_itself_leaves_no_line(spec: Spec) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        display.update(record(100, held_out=2.25))
    assert "held-out 2.2500" not in text(out)


def test_a_second_run_starts_with_none_of_the_firsts_losses(spec: Spec) -> None:
    out = console(is_terminal=False)
    with RunDisplay(console=out) as display:
        display.begin("one", spec)
        display.update(record(100, held_out=2.25))
        display.begin("two", spec)
        display.update(record(100))
    first, second = text(out).splitlines()
    assert "held-out 2.2500" in first
    assert "held-out" not in second


def test_without_a_terminal_an_evaluation_is_a_plain_line_and_at_most_one_a_second(spec: Spec, clock: Clock) -> None:
    out = console(NARROW, is_terminal=False)
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        for step in range(1, 100):
            clock.now += 0.1
            display.update(record(step, held_out=3.0 if step % 5 == 0 else None))
    lines = text(out).splitlines()
    assert "\x1b" not in text(out)
    assert len(lines) == 9  # 9.9 seconds
    assert lines[0].startswith("demo: DiLoCo, H = 10, int4  step 10 of 100  round 1  loss 2.5000  held-out 3.0000  ")
    assert all(line.endswith(" left") for line in lines)


def test_a_log_shows_life_between_evaluations(spec: Spec, clock: Clock) -> None:
    out = console(is_terminal=False)
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        for step in range(1, 21):
            clock.now += 10
            display.update(record(step))
    assert len(text(out).splitlines()) == 3  # 200 seconds


def test_the_last_record_is_a_plain_line_whatever_the_time(spec: Spec, clock: Clock) -> None:
    out = console(is_terminal=False)
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        display.update(record(100))
    assert text(out).startswith(
        "demo: DiLoCo, H = 10, int4  step 100 of 100  round 10  loss 2.5000  2K tokens/s  97.7 KiB sent  in 0:50"
    )
    assert clock.now == 1000.0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_prints_nothing(spec: Spec, is_terminal: bool) -> None:
    out = console(is_terminal=is_terminal)
    with RunDisplay(quiet=True, console=out) as display:
        display.begin("demo", spec, number=1, of=2)
        display.prepare(Prepared(1, 2, 3, 4))
        for step in range(1, 101):
            display.update(record(step, held_out=2.0))
    with PrepareDisplay(quiet=True, console=out) as preparing:
        preparing.update(Prepared(1, 2, 3, 4))
    assert text(out) == ""


def test_time_left_is_sensible_from_the_first_record_on(spec: Spec, clock: Clock) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        clock.now += 30  # the model is built, the first step compiled
        display.update(record(1, seconds=2.0))
    assert "3:18 left" in text(out)  # 99 steps of 2 seconds


def test_a_resumed_runs_time_left_is_that_of_its_earlier_part_at_first(spec: Spec, clock: Clock) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        display.update(record(60, seconds=120.0))
    assert "1:20 left" in text(out)
    assert clock.now == 1000.0


def test_time_left_follows_the_wall_clock_once_there_is_some(spec: Spec, clock: Clock) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        for step in range(1, 51):
            clock.now += 3.0  # of which the training itself, which the records count, is a third
            display.update(record(step, seconds=step * 1.0))
    last = text(out).rsplit("step 50 of 100", 1)[1]
    assert "2:30 left" in last  # 50 steps of 3 seconds
    assert "333 a second" in last


def test_time_left_before_anything_is_known_is_a_question_mark(spec: Spec, clock: Clock) -> None:
    out = console()
    with RunDisplay(console=out) as display:
        display.begin("demo", spec)
        display.update(record(1, seconds=0.0))
    assert "? left" in text(out)
    assert clock.now == 1000.0


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(0, 40))
def test_a_sparkline_is_the_last_values_from_lowest_to_highest_bar(values: list[float], width: int) -> None:
    drawn = sparkline(values, width)
    shown = values[max(0, len(values) - width) :]
    assert len(drawn) == len(shown)
    if shown and max(shown) - min(shown) > 1e-3:
        assert drawn[shown.index(min(shown))] == "▁"
        assert drawn[shown.index(max(shown))] == "█"
        bars = [bar for _, bar in sorted(zip(shown, drawn, strict=True))]
        assert bars == sorted(bars)


def test_a_sparkline_of_nothing_of_one_value_and_of_what_is_no_number() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.5]) == "▁"
    assert sparkline([1.0, float("nan"), 2.0, float("inf")]) == "▁ █ "
    assert sparkline([float("nan")]) == " "


@pytest.mark.parametrize("width", [40, 80, 200])
def test_preparing_is_one_line_that_fits(width: int) -> None:
    line = prepare_text(Prepared(3 * 2**20, 12 * 2**20, 41_000, 3_100_000), width)
    assert len(line) <= min(width, 100)
    assert "3.0 MiB of 12.0 MiB" in line.plain
    if width >= 80:
        assert "41K documents  3.1M tokens" in line.plain
        assert " 25% " in line.plain


def test_preparing_an_input_of_unknown_or_no_size_shows_what_is_done() -> None:
    assert prepare_text(Prepared(2048, 0, 7, 2), 80).plain == "preparing text  2.0 KiB  7 documents  2 tokens"


def test_preparing_is_redrawn_a_few_times_a_second(clock: Clock) -> None:
    out = console()
    with PrepareDisplay(console=out) as display:
        for i in range(100):
            clock.now += 0.01
            display.update(Prepared(i, 100, i, i))
    assert 3 <= text(out).count("preparing text") <= 5


def test_without_a_terminal_long_preparing_is_a_plain_line_now_and_then_and_short_preparing_none(clock: Clock) -> None:
    out = console(is_terminal=False)
    with PrepareDisplay(console=out) as display:
        for i in range(45):
            display.update(Prepared(i, 100, i, i))
            clock.now += 1.0
    lines = text(out).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("preparing text") for line in lines)
