"""TensorBoard's event files hold the records' figures, and a resumed run's steps once."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from isles.errors import DataError
from isles.metrics import StepRecord
from isles.watch import TensorBoard


def record(step: int, held_out: float | None = None, loss: float = 2.5) -> StepRecord:
    return StepRecord(step, step // 2, step * 100, loss, held_out, step * 1000, 1e-3, 0.5, 4, step * 0.1)


def events(file: Path) -> list[Any]:
    """Every event of a file, read without the library's own writer: length, its checksum, the message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        found.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += 12 + length + 4
    return found


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: files in the order of their names; a START event takes back its step and later ones."""
    shown: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.stat().st_mtime_ns):
        for event in events(file):
            if event.HasField("session_log"):
                shown = {tag: {s: v for s, v in steps.items() if s < event.step} for tag, steps in shown.items()}
            for value in event.summary.value:
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


def test_the_files_hold_every_figure_of_every_record(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "tb") as board:
        for step in (1, 2, 3):
            board.add(record(step, held_out=2.25 if step == 2 else None))
    shown = scalars(tmp_path / "tb")
    assert shown["loss"] == {1: 2.5, 2: 2.5, 3: 2.5}
    assert shown["held_out_loss"] == {2: 2.25}
    assert shown["tokens"] == {1: 100, 2: 200, 3: 300}
    assert shown["bytes"] == {1: 1000, 2: 2000, 3: 3000}
    assert shown["round"] == {1: 0, 2: 1, 3: 1}
    assert shown["clusters"] == {1: 4, 2: 4, 3: 4}
    assert shown["grad_norm"] == {1: 0.5, 2: 0.5, 3: 0.5}
    assert shown["lr"] == {s: pytest.approx(1e-3) for s in (1, 2, 3)}


def test_a_resumed_run_shows_each_step_once_with_its_later_figures(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "tb") as board:
        for step in (1, 2, 3, 4):
            board.add(record(step, loss=3.0))
    with TensorBoard(tmp_path / "tb") as board:  # from the checkpoint of step 2, in the same second
        board.add(record(3, loss=2.0))
    assert len(list((tmp_path / "tb").iterdir())) == 2
    assert scalars(tmp_path / "tb")["loss"] == {1: 3.0, 2: 3.0, 3: 2.0}


def test_the_first_run_takes_nothing_back_and_the_file_says_the_format_that_can(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "tb") as board:
        board.add(record(1))
    (file,) = (tmp_path / "tb").iterdir()
    found = events(file)
    assert found[0].file_version == "brain.Event:2"
    assert not any(event.HasField("session_log") for event in found)


def test_a_run_without_records_leaves_no_folder(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "tb"):
        pass
    assert not (tmp_path / "tb").exists()


def test_an_unwritable_place_is_a_sentence_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with TensorBoard(tmp_path / "file" / "tb") as board, pytest.raises(DataError, match="tb cannot be written"):
        board.add(record(1))
