"""The picture: drawn from any runs, the same bytes for the same records, and nothing that hides what it is for."""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.errors import DataError
from isles.metrics import MetricsFile, StepRecord, Summary, write_summary
from isles.watch import RunSeries, draw, load_series
from isles.watch.picture import _figure, _limits, byte_ticks, spread


def series(method: str = "diloco", steps: int = 200, *, every: int = 10, final: float = 2.0, **changes: object) -> RunSeries:
    """A run whose loss falls from about 6 to `final`."""
    clusters = 1 if method == "single" else 4
    sent = {"diloco": 1000, "ddp": 100_000, "single": 0}[method]
    records = tuple(
        StepRecord(
            step=n, round=n // 10, tokens=n * 512 * clusters, loss=final + 4 * math.exp(-n / 20),
            held_out_loss=final + 4 * math.exp(-n / 20) if n % every == 0 or n == steps else None, bytes=n // 10 * 10 * sent,
            lr=1e-3, grad_norm=1.0, clusters=clusters, seconds=n * 0.1,
        )
        for n in range(1, steps + 1)
    )  # fmt: skip
    last = records[-1]
    summary = Summary(
        name="demo", method=method, clusters=clusters, local_steps=10, parameters=117_120, steps=steps, rounds=last.round,
        tokens=last.tokens, bytes=last.bytes, loss=last.loss, held_out_loss=last.held_out_loss or 0.0, seconds=last.seconds,
        tokens_per_second=100.0, seed=0, spec_digest="ab", complete=True,
    )  # fmt: skip
    return RunSeries(method, replace(summary, **changes), records)  # type: ignore[arg-type]


THREE = [series("diloco", final=2.2), series("ddp"), series("single", final=2.5)]


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert zlib.crc32(data[12:29]) == struct.unpack(">I", data[29:33])[0]
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def words(svg: Path) -> str:
    """The words of an SVG, which matplotlib keeps in comments beside their outlines."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


CASES = {
    "one run": [series()],
    "three runs": THREE,
    "ten runs": [series(final=2 + i / 50, local_steps=10 * (i + 1)) for i in range(10)],
    "no bytes at all": [series("single")],
    "a single record": [series(steps=1, every=1)],
    "no record": [RunSeries("diloco", series().summary, ())],
    "not one evaluation": [replace(series(), records=tuple(replace(r, held_out_loss=None) for r in series().records))],
    "equal losses": [replace(series(), records=tuple(replace(r, held_out_loss=2.0, loss=2.0) for r in series().records))],
    "one size of bytes": [replace(series(), records=tuple(replace(r, bytes=200_000) for r in series().records))],
}


@pytest.mark.parametrize("runs", CASES.values(), ids=CASES.keys())
def test_any_runs_can_be_drawn(tmp_path: Path, runs: list[RunSeries]) -> None:
    draw(runs, tmp_path / "deep" / "picture.png")
    width, height = size(tmp_path / "deep" / "picture.png")
    assert 800 <= width <= 2600
    assert 600 <= height <= 1600


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_same_records_give_the_same_bytes_in_another_process_and_whatever_matplotlib_is_told(
    tmp_path: Path, ending: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = series(steps=40)
    with MetricsFile(folder / "metrics.jsonl") as file:
        for record in run.records:
            file.append(record)
    write_summary(folder / "summary.json", run.summary)
    draw([load_series(folder)], tmp_path / f"here.{ending}")
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nlines.linewidth: 9\n")
    program = f"from pathlib import Path; from isles.watch import draw, load_series; draw([load_series(Path('run'))], Path('there.{ending}'))"
    source = str(Path(__file__).resolve().parents[2] / "src")
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}); {program}"], cwd=tmp_path, check=True)
    assert (tmp_path / f"there.{ending}").read_bytes() == (tmp_path / f"here.{ending}").read_bytes()


def test_an_svg_says_what_each_run_is_and_what_it_sent(tmp_path: Path) -> None:
    draw(THREE, tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    for text in (
        "demo: 117,120 parameters", "DiLoCo", "2.200 · 195.3 KiB sent · 4 clusters, H = 10", "data-parallel",
        "2.000 · 19.1 MiB sent", "one cluster alone", "2.500 · sends nothing", "tokens trained, all clusters; faint: training loss",
        "bytes sent over the internet, all clusters", "held-out loss, nats per token",
    ):  # fmt: skip
        assert text in said


def test_a_stopped_run_says_so_and_many_runs_are_told_apart(tmp_path: Path) -> None:
    draw([series(complete=False), series(local_steps=50)], tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    assert "stopped at step 200" in said
    assert "DiLoCo, 4 clusters, H = 10" in said
    assert "DiLoCo, 4 clusters, H = 50" in said


def test_the_run_that_sends_nothing_is_a_dashed_line_at_its_loss() -> None:
    axes = _figure(THREE).axes[1]
    (dashed,) = [line for line in axes.lines if set(line.get_ydata()) == {THREE[2].summary.held_out_loss}]
    assert list(dashed.get_xdata()) == [0, 1]  # from edge to edge
    assert dashed.get_linestyle() == "--"


def test_runs_that_send_nothing_have_one_panel() -> None:
    assert len(_figure([series("single")]).axes) == 1
    assert len(_figure(THREE).axes) == 2


def test_no_two_of_twenty_runs_look_the_same() -> None:
    axes = _figure([series(final=2 + i / 50, local_steps=i + 1, steps=20, every=1) for i in range(20)]).axes[0]
    drawn = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in axes.lines if len(line.get_xdata()) > 1}
    assert len(drawn) == 20


def test_no_label_touches_another_or_leaves_the_picture() -> None:
    for runs in (THREE, CASES["ten runs"], [series(name="n" * 60 + str(i), seed=i) for i in range(20)]):
        figure = _figure(runs)
        figure.canvas.draw()
        axes = figure.axes[1]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 2 * len(runs)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
        assert all(
            box.x0 >= axes.bbox.x1 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes
        )


def test_the_labels_of_the_bytes_do_not_touch() -> None:
    for runs in (THREE, [series()], [series(steps=20)]):
        figure = _figure(runs)
        figure.canvas.draw()
        boxes = [label.get_window_extent() for label in figure.axes[1].get_xticklabels() if label.get_text()]
        assert boxes
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_the_first_fall_is_left_out_of_view_and_every_end_is_in_it() -> None:
    low, high = _limits(THREE)
    assert high < 3.5
    for run in THREE:
        assert low < run.summary.held_out_loss < high


def test_few_evaluations_are_all_in_view() -> None:
    low, high = _limits([series(steps=60, every=20)])
    assert low < 2.0 + 4 * math.exp(-3) < 2.0 + 4 * math.exp(-1) < high


def test_an_interrupted_run_ends_where_its_summary_says() -> None:
    run = series(steps=105, every=10)
    cut = replace(run, records=run.records[:104], summary=replace(run.summary, steps=104, tokens=104 * 2048, held_out_loss=2.4))
    assert cut.points[-1] == (104 * 2048, cut.summary.bytes, 2.4)
    assert len(cut.points) == 11
    assert run.points[-1][0] == run.records[-1].tokens
    assert len(run.points) == 11


@given(st.floats(1, 2**59), st.floats(1.7, 1e9))
def test_byte_ticks_lie_between_the_limits_rise_and_leave_room(low: float, ratio: float) -> None:
    ticks = byte_ticks(low, low * ratio)
    assert ticks
    assert all(low <= tick <= low * ratio for tick in ticks)
    assert all(a < b for a, b in pairwise(ticks))
    if ratio < 1e7:
        assert all(math.log(b / a) >= 0.13 * math.log(ratio) for a, b in pairwise(ticks))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_spreading_keeps_the_order_the_distance_and_the_limits(places: list[float]) -> None:
    distance = 0.9 / len(places)
    moved = spread(places, distance)
    assert all(-1e-9 <= at <= 1 + 1e-9 for at in moved)
    ranked = [at for _, at in sorted(zip(places, moved, strict=True), key=lambda pair: pair[0])]
    assert all(b - a >= 0.9 * distance for a, b in pairwise(ranked))


def test_places_that_are_apart_already_do_not_move() -> None:
    assert spread([0.5, 0.1, 0.9], 0.2) == [0.5, 0.1, 0.9]


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.jpeg"])
def test_another_ending_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"neither a \.png nor a \.svg"):
        draw(THREE, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_path_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for out in (tmp_path / "file" / "picture.png", tmp_path / "folder.png"):
        with pytest.raises(DataError, match="cannot be written"):
            draw([series()], out)


def test_nothing_to_draw_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run to draw"):
        draw([], tmp_path / "picture.png")


def test_drawing_leaves_a_notebooks_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 23}):
        before = dict(mpl.rcParams)
        draw([series(steps=20)], tmp_path / "picture.png")
        assert dict(mpl.rcParams) == before


def test_a_folder_without_metrics_or_without_a_summary_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        load_series(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"summary\.json does not exist"):
        load_series(tmp_path)
