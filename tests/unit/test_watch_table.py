"""The comparison: its arithmetic, and that nothing is cut however narrow the terminal."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isles.metrics import Summary
from isles.watch import comparison_markdown, comparison_rows, comparison_table

DILOCO = Summary(
    name="demo", method="diloco", clusters=4, local_steps=10, parameters=117_120, steps=100, rounds=10, tokens=204_800,
    bytes=1_000_000, loss=2.5, held_out_loss=2.2, seconds=67.5, tokens_per_second=3034.6, seed=0, spec_digest="ab" * 32,
    complete=True,
)  # fmt: skip
DDP = replace(DILOCO, method="ddp", rounds=0, bytes=75_000_000, held_out_loss=2.0)
SINGLE = replace(DILOCO, method="single", clusters=1, rounds=0, tokens=51_200, bytes=0, held_out_loss=3.0)


def shown(summaries: list[Summary], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(comparison_table(summaries))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def row(summary: Summary, beside: list[Summary]) -> dict[str, Any]:
    return comparison_rows([summary, *beside])[0]


def test_gap_closed_is_the_share_of_the_way_from_one_cluster_alone_to_data_parallel() -> None:
    assert row(DILOCO, [DDP, SINGLE])["gap_closed"] == pytest.approx(0.8)
    assert row(DDP, [SINGLE])["gap_closed"] == 1.0
    assert row(SINGLE, [DDP])["gap_closed"] == 0.0
    assert row(replace(DILOCO, held_out_loss=3.5), [DDP, SINGLE])["gap_closed"] == pytest.approx(-0.5)


@pytest.mark.parametrize(
    "beside", [[], [DDP], [SINGLE], [replace(DDP, held_out_loss=3.0), SINGLE], [replace(DDP, held_out_loss=4.0), SINGLE]]
)
def test_there_is_no_gap_to_close_without_both_baselines_or_where_data_parallel_is_no_better(beside: list[Summary]) -> None:
    assert row(DILOCO, beside)["gap_closed"] is None


def test_fewer_bytes_is_data_parallels_bytes_over_the_runs() -> None:
    assert row(DILOCO, [DDP])["fewer_bytes"] == 75.0
    assert row(DDP, [])["fewer_bytes"] == 1.0
    assert row(DILOCO, [SINGLE])["fewer_bytes"] is None
    assert row(SINGLE, [DDP])["fewer_bytes"] is None
    assert row(DILOCO, [replace(DDP, bytes=0)])["fewer_bytes"] is None


@given(st.floats(0, 1e6))
def test_perplexity_is_the_exponential_of_the_held_out_loss_and_always_finite(loss: float) -> None:
    perplexity = row(replace(DILOCO, held_out_loss=loss), [])["perplexity"]
    assert math.isfinite(perplexity)
    if loss < 700:
        assert perplexity == math.exp(loss)


def test_rows_stand_in_the_order_given_with_every_field_of_their_summaries() -> None:
    rows = comparison_rows([SINGLE, DILOCO, DDP])
    assert [r["method"] for r in rows] == ["single", "diloco", "ddp"]
    assert {k: rows[1][k] for k in ("tokens", "bytes", "seed", "spec_digest")} == {
        "tokens": 204_800, "bytes": 1_000_000, "seed": 0, "spec_digest": "ab" * 32,
    }  # fmt: skip
    assert comparison_rows([]) == []


BIG = [
    replace(
        s,
        clusters=128,
        local_steps=10_000,
        tokens=999_400_000_000,
        bytes=s.bytes * 10**6,
        seconds=999_999,
        name="n" * 30 + str(i),
    )
    for i, s in enumerate([DILOCO, DDP, SINGLE])
]


@pytest.mark.parametrize(
    "runs", [[DILOCO, DDP, SINGLE], [replace(DILOCO, complete=False), DDP], BIG], ids=["usual", "stopped", "big"]
)
@pytest.mark.parametrize("width", range(40, 140, 3))
def test_nothing_is_cut_at_any_width(runs: list[Summary], width: int) -> None:
    lines = shown(runs, width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for summary in runs:
        assert any(f"{summary.held_out_loss:.4f}" in line for line in lines)


def test_80_columns_hold_what_a_comparison_is_for_in_one_line_a_run() -> None:
    lines = shown([DILOCO, DDP, SINGLE], 80)
    assert lines[3].split() == ["DiLoCo", "205K", "2.2000", "80%", "244.1", "KiB", "75x", "1:08", "3.03K"]
    assert lines[4] == "4 clusters, H = 10"
    assert lines[0].split() == ["held-out", "gap", "sent", "a", "fewer", "tokens"]
    assert lines[1].split() == ["run", "tokens", "loss", "closed", "cluster", "bytes", "time", "per", "s"]
    assert len(lines) == 7


def test_120_columns_name_every_column_in_full() -> None:
    head = shown([DILOCO, DDP, SINGLE], 120)[0]
    for name in (
        "run",
        "clusters",
        "H",
        "tokens",
        "held-out loss",
        "gap closed",
        "sent a cluster",
        "fewer bytes",
        "time",
        "tokens/s",
    ):
        assert name in head


def test_an_interrupted_run_says_where_it_stopped() -> None:
    assert any("stopped at step 1,234" in line for line in shown([replace(DILOCO, complete=False, steps=1234)], 80))
    assert "(stopped at step 1,234)" in comparison_markdown([replace(DILOCO, complete=False, steps=1234)])


def test_runs_that_differ_by_name_or_by_seed_alone_are_told_apart() -> None:
    named = shown([replace(DILOCO, name="small"), replace(DILOCO, name="large")], 120)
    assert named[2].startswith("small ")
    assert named[3].startswith("large ")
    seeds = shown([DILOCO, replace(DILOCO, seed=7)], 120)
    assert seeds[2].startswith("DiLoCo, seed 0 ")
    assert seeds[3].startswith("DiLoCo, seed 7 ")


def test_markdown_has_one_row_a_run_and_as_many_cells_as_heads() -> None:
    lines = comparison_markdown([DILOCO, DDP, SINGLE]).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert len(lines) == 5
    assert {len(c) for c in cells} == {10}
    assert cells[2] == ["DiLoCo", "4", "10", "205K", "2.2000", "80%", "244.1 KiB", "75x", "1:08", "3.03K"]
    assert cells[4] == ["one cluster alone", "1", "-", "51.2K", "3.0000", "0%", "nothing", "-", "1:08", "3.03K"]


def test_no_runs_at_all_are_a_table_of_heads() -> None:
    assert shown([], 80)
    assert comparison_markdown([]).count("\n") == 1
