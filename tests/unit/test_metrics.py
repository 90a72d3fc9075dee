"""The records of a run: what is written is what is read, damage is named, and nothing that is no number is ever written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.errors import DataError
from isles.metrics import MetricsFile, StepRecord, Summary, read_records, read_summary, to_json_line, write_summary

COUNTS = st.integers(0, 2**60)
REALS = st.floats(allow_nan=False, allow_infinity=False)
RECORDS = st.builds(
    StepRecord,
    step=COUNTS, round=COUNTS, tokens=COUNTS, loss=REALS, held_out_loss=st.none() | REALS, bytes=COUNTS,
    lr=REALS, grad_norm=REALS, clusters=COUNTS, seconds=REALS,
)  # fmt: skip
SUMMARY = Summary(
    name="demo", method="diloco", clusters=4, local_steps=10, parameters=117_120, steps=100, rounds=10, tokens=204_800,
    bytes=3_735_120, loss=2.57, held_out_loss=2.45, seconds=67.5, tokens_per_second=3034.6, seed=0, spec_digest="ab" * 32,
    complete=True,
)  # fmt: skip


def record(step: int, **changes: Any) -> StepRecord:
    made = StepRecord(
        step=step, round=step // 10, tokens=step * 100, loss=3.0 - step / 1000, held_out_loss=None, bytes=step * 7,
        lr=1e-3, grad_norm=0.5, clusters=4, seconds=step * 0.25,
    )  # fmt: skip
    return replace(made, **changes)


def written(path: Path, records: list[StepRecord]) -> Path:
    with MetricsFile(path) as file:
        for one in records:
            file.append(one)
    return path


@given(records=st.lists(RECORDS, max_size=5))
def test_records_read_back_are_those_written(tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord]) -> None:
    path = written(tmp_path_factory.mktemp("m") / "metrics.jsonl", records)
    assert list(read_records(path)) == records


def test_a_line_is_one_json_object_with_the_fields_of_the_record(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", [record(1, held_out_loss=2.5), record(2)])
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(record(1, held_out_loss=2.5)), asdict(record(2))]


def test_every_record_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for step in (1, 2, 3):
            file.append(record(step))
            assert [r.step for r in read_records(file.path)] == list(range(1, step + 1))


@given(cut=st.integers(1, 100))
def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = written(tmp_path_factory.mktemp("m") / "metrics.jsonl", [record(1), record(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [r.step for r in read_records(path)] == [1]


def test_zeros_at_the_end_after_a_loss_of_power_are_a_cut_line(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", [record(1)])
    path.write_bytes(path.read_bytes() + bytes(512))
    assert [r.step for r in read_records(path)] == [1]


@pytest.mark.parametrize("tail", ["{", "x" * 10_000], ids=["short", "longer than a block"])
def test_appending_after_a_crash_spoils_neither_record(tmp_path: Path, tail: str) -> None:
    path = written(tmp_path / "metrics.jsonl", [record(1)])
    path.write_text(path.read_text() + tail)
    written(path, [record(2)])
    assert [r.step for r in read_records(path)] == [1, 2]


def test_appending_to_a_file_of_nothing_but_a_cut_line_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert list(read_records(written(tmp_path / "metrics.jsonl", [record(1)]))) == [record(1)]


GOOD = asdict(record(2))
BAD_LINES = {
    "no JSON": "{oops",
    "no object": "[1, 2]",
    "empty": "",
    "no loss": json.dumps({k: v for k, v in GOOD.items() if k != "loss"}),
    "step is text": json.dumps(GOOD | {"step": "2"}),
    "step is half": json.dumps(GOOD | {"step": 2.5}),
    "step is true": json.dumps(GOOD | {"step": True}),
    "loss is null": json.dumps(GOOD | {"loss": None}),
    "loss is NaN": json.dumps(GOOD | {"loss": math.nan}),
    "held-out loss is infinite": json.dumps(GOOD | {"held_out_loss": math.inf}),
    "no text": "\udcff",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    lines = [to_json_line(record(1)), line, to_json_line(record(3))]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(x + "\n" for x in lines).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is no record") as caught:
        list(read_records(path))
    assert "\n" not in str(caught.value)


def test_the_message_says_which_field_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(BAD_LINES["step is text"] + "\n")
    with pytest.raises(DataError, match='its step is "2"'):
        list(read_records(tmp_path / "m"))


def test_fields_of_a_later_version_are_passed_over_and_whole_numbers_do_for_reals(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(json.dumps(GOOD | {"temperature": 7, "loss": 3}) + "\n")
    (read,) = read_records(tmp_path / "m")
    assert read == replace(record(2), loss=3.0)
    assert type(read.loss) is float


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_records(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["loss", "held_out_loss", "lr", "grad_norm", "seconds"])
def test_what_is_no_number_is_never_written(tmp_path: Path, field: str, value: float) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.append(record(1))
        with pytest.raises(ValueError, match="JSON"):
            file.append(record(2, **{field: value}))
        file.append(record(3))
    assert [r.step for r in read_records(file.path)] == [1, 3]


@given(steps=st.lists(st.integers(1, 50), unique=True, max_size=12).map(sorted), at=st.integers(0, 60))
def test_truncating_keeps_exactly_the_steps_up_to_the_checkpoint_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], at: int
) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in steps:
            file.append(record(step))
        file.truncate_after(at)
        file.append(record(1000))
    assert [r.step for r in read_records(path)] == [s for s in steps if s <= at] + [1000]
    assert [f.name for f in path.parent.iterdir()] == ["metrics.jsonl"]  # no temporary file stays


def test_an_unwritable_place_is_a_sentence_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/metrics\.jsonl cannot be written"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl")
    with pytest.raises(DataError, match=r"nowhere/summary\.json cannot be written"):
        write_summary(tmp_path / "nowhere" / "summary.json", SUMMARY)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_sentence_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    file = MetricsFile.__new__(MetricsFile)  # the device cannot be searched for a cut line
    file.path = tmp_path / "metrics.jsonl"
    file._file = file.path.open("ab", buffering=0)
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written \(No space left"), file:
        file.append(record(1))


def test_a_summary_read_back_is_the_one_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, replace(SUMMARY, complete=False))
    write_summary(path, SUMMARY)
    assert read_summary(path) == SUMMARY
    assert set(json.loads(path.read_text())) == set(asdict(SUMMARY))
    assert [f.name for f in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_with_nan_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", SUMMARY)
    with pytest.raises(ValueError, match="JSON"):
        write_summary(tmp_path / "summary.json", replace(SUMMARY, loss=math.nan))
    assert read_summary(tmp_path / "summary.json") == SUMMARY


def test_a_missing_summary_says_that_no_run_has_ended_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run has ended there yet"):
        read_summary(tmp_path / "summary.json")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe\x00", json.dumps(asdict(SUMMARY) | {"bytes": "many"}).encode(),
        json.dumps({k: v for k, v in asdict(SUMMARY).items() if k != "tokens"}).encode(),
        json.dumps(asdict(SUMMARY) | {"held_out_loss": math.nan}).encode(),
        json.dumps(asdict(SUMMARY) | {"complete": 1}).encode(),
    ],
    ids=["empty", "cut", "list", "null", "no text", "bytes is text", "no tokens", "NaN", "complete is a number"],
)  # fmt: skip
def test_a_damaged_summary_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(DataError, match=r"summary\.json is no summary of a run") as caught:
        read_summary(tmp_path / "summary.json")
    assert "\n" not in str(caught.value)


def test_a_folder_in_a_summarys_place_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_summary(tmp_path / "summary.json")
