"""Runs under the command line: stopped, killed, damaged, moved or resumed, they end at the same parameters and lose nothing."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.cli.common import Stop, stop_on_signals
from isles.simulator import RunFolder
from isles.watch import RunDisplay

Isles = Callable[..., Any]  # the fixture of conftest.py


@pytest.fixture
def spec(cli_spec: Path) -> Path:
    return cli_spec


def parameters(folder: Path) -> bytes:
    """The global parameters of the newest checkpoint, byte for byte."""
    return RunFolder(folder).load_model()[1].numpy().tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT, times: int = 1) -> None:
    """Send this process a signal once the run shows a step."""

    def update(_self: RunDisplay, record: object) -> None:
        if getattr(record, "step") == step:  # noqa: B009 (the record's type is the display's business)
            for _ in range(times):
                os.kill(os.getpid(), number)

    monkeypatch.setattr(RunDisplay, "update", update)


def command_after(text: str) -> list[str]:
    """The words of the command that a message ends with, as a shell reads them."""
    words = shlex.split(text.strip().split("go on with: ")[1])
    assert words[0] == "isles"
    return words[1:]


# --- folders of runs


def test_a_folder_that_holds_something_is_refused_and_untouched(
    isles: Isles, spec: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "picture.png").write_text("mine")
    before, run_before = contents(tmp_path), contents(finished)
    for words in (
        ["--out", tmp_path],
        ["--out", tmp_path, "--resume"],
        ["--out", tmp_path / "notes.txt"],
        ["--out", tmp_path / "notes.txt" / "x"],
    ):
        isles("simulate", spec, *words).is_mistake(2)
    for folder in (tmp_path, tmp_path / "notes.txt", finished):
        isles("simulate", spec, "--out", folder, "--compare").is_mistake(2)
    isles("simulate", spec, "--out", finished).is_mistake(2)
    for words in (
        ["--set", "optimizer.lr=0.1"],
        ["--baseline", "ddp"],
        ["--clusters", "3"],
        ["--checkpoint", "5"],
        ["--checkpoint", "-1"],
    ):
        isles("simulate", spec, "--out", finished, "--resume", *words).is_mistake(7)
    assert contents(tmp_path) == before
    assert contents(finished) == run_before


def test_a_complete_run_resumes_to_the_same_result(isles: Isles, spec: Path, finished: Path, run: Path) -> None:
    before = isles("compare", finished, "--json").json
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0
    assert isles("compare", run, "--json").json == before
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_run_that_another_process_works_on_is_left_alone(isles: Isles, spec: Path, run: Path) -> None:
    with RunFolder(run).held():
        assert "another process" in isles("simulate", spec, "--out", run, "--resume").is_mistake(2)
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0


def test_a_picture_that_cannot_be_drawn_does_not_hide_the_result(isles: Isles, spec: Path, run: Path) -> None:
    (run / "picture.png").unlink()
    (run / "picture.png").mkdir()
    ended = isles("simulate", spec, "--out", run, "--resume", "--json")
    assert (ended.code, len(ended.err.splitlines())) == (4, 1)
    assert ended.json["complete"] is True
    assert ended.json["picture"] is None


def test_a_damaged_checkpoint_names_the_one_before_and_that_one_completes_the_run(
    isles: Isles, spec: Path, finished: Path, run: Path
) -> None:
    (run / "checkpoints" / "step-000000012" / "global.safetensors").write_bytes(b"x")
    for words in (["simulate", spec, "--out", run, "--resume"], ["sample", run], ["export", run, "--out", run / "hf"]):
        assert "--checkpoint 8" in isles(*words).is_mistake(7)
    assert (
        isles("simulate", spec, "--out", run, "--resume", "--checkpoint", "8", "--quiet", "--set", "checkpoint.every=99").code
        == 0
    )
    assert parameters(run) == parameters(finished)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 12


def test_going_back_and_stopping_resumes_from_there_even_when_few_are_kept(
    isles: Isles, spec: Path, finished: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 6)
        ended = isles("simulate", spec, "--out", run, "--resume", "--checkpoint", "4", "--set", "checkpoint.keep=1")
    assert ended.code == 130
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000000006"]
    assert isles(*command_after(ended.err)).code == 0
    assert parameters(run) == parameters(finished)


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"[]", b"{}", b'{"format": 1}', b'{"format": 1, "spec": 5}'])
def test_a_damaged_record_of_a_run_is_one_sentence_and_resuming_mends_it(
    damage: bytes, isles: Isles, spec: Path, run: Path
) -> None:
    (run / "run.json").write_bytes(damage)
    for words in (["sample", run], ["export", run, "--out", run / "hf"]):
        isles(*words).is_mistake(7)
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0
    assert isles("sample", run, "--max-tokens", "2").code == 0


def test_a_run_killed_before_its_first_checkpoint_resumes_from_its_start(
    isles: Isles, spec: Path, finished: Path, run: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    isles("simulate", spec, "--out", run).is_mistake(2)
    isles("simulate", spec, "--out", run, "--resume", "--set", "optimizer.lr=0.1").is_mistake(7)
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0
    assert parameters(run) == parameters(finished)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 12


def test_a_damaged_record_without_any_checkpoint_is_mended_too(isles: Isles, spec: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "run.json").write_text("{")
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0


def test_a_run_killed_while_it_wrote_its_record_starts_again(isles: Isles, spec: Path, tmp_path: Path) -> None:
    (tmp_path / ".run.json.writing").write_text('{"form')
    (tmp_path / ".tokenizer.writing").mkdir()
    assert isles("simulate", spec, "--out", tmp_path, "--quiet", "--set", "run.steps=3").code == 0
    assert isles("sample", tmp_path, "--max-tokens", "2").code == 0


def test_the_data_may_be_gone_for_sampling_and_come_back_for_resuming(isles: Isles, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("an island and an island " * 200)
    words = ["simulate", spec, "--set", f"data.path={tmp_path / 'data'}", "--set", f'data.inputs=["{tmp_path / "text.txt"}"]']
    words += ["--set", "data.held_out=0.2", "--out", tmp_path / "run", "--quiet"]
    assert isles(*words).code == 0
    shutil.rmtree(tmp_path / "data")
    assert isles("sample", tmp_path / "run", "--max-tokens", "2").code == 0
    assert isles(*words, "--resume").code == 0
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "text.txt").unlink()
    isles(*words, "--resume").is_mistake(4)
    (tmp_path / "text.txt").write_text("other text " * 300)
    isles(*words, "--resume").is_mistake(7)


def test_a_diverged_run_ends_with_its_code(isles: Isles, spec: Path, tmp_path: Path) -> None:
    isles("simulate", spec, "--out", tmp_path / "run", "--quiet", "--set", "optimizer.lr=1e30").is_mistake(8)


# --- comparisons


def test_a_comparison_is_resumed_where_it_stopped_and_never_with_another_spec(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", spec, "--out", tmp_path / "c", "--set", "run.steps=4", "--compare", "--json"]
    with monkeypatch.context() as patch:
        signal_at(patch, 4, signal.SIGTERM)  # the last step of the first run: that one is complete
        ended = isles(*words)
    assert ended.code == 143
    assert [r["complete"] for r in ended.json["runs"]] == [True]
    assert command_after(ended.err) == command_after("go on with: " + str(ended.json["resume"]))
    isles(*words).is_mistake(2)
    isles(*words, "--resume", "--set", "optimizer.lr=0.1").is_mistake(7)
    again = isles(*command_after(ended.err))
    assert again.code == 0
    assert [r["method"] for r in again.json["runs"]] == ["diloco", "ddp", "single"]


# --- stopping


def test_a_stopped_run_prints_the_command_that_completes_it(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "it's [a] ö"
    odd.mkdir()
    shutil.copy(spec, odd / "run.toml")
    words = [
        "simulate",
        odd / "run.toml",
        "--set",
        "run.name=odd",
        "--set",
        "optimizer.betas=[0.8, 0.9]",
        "--clusters",
        "3",
        "--baseline",
        "ddp",
    ]
    assert isles(*words, "--out", tmp_path / "whole", "--quiet").code == 0
    with monkeypatch.context() as patch:
        signal_at(patch, 6)
        ended = isles(*words, "--out", odd / "run", "--json")
    assert (ended.code, ended.json["complete"], ended.json["steps"]) == (130, False, 6)
    assert "stopped and saved at step 6" in ended.err
    assert isles(*command_after(ended.err)).json["complete"] is True
    assert parameters(odd / "run") == parameters(tmp_path / "whole")


def test_a_run_stopped_at_its_last_step_is_complete(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_at(monkeypatch, 12)
    ended = isles("simulate", spec, "--out", tmp_path / "run", "--json")
    assert (ended.code, ended.err, ended.json["complete"]) == (0, "", True)


def test_a_second_interrupt_leaves_at_once_and_loses_no_checkpoint(
    isles: Isles, spec: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 6, times=2)
        ended = isles("simulate", spec, "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (130, "")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000004"]
    assert isles(*command_after(ended.err), "--quiet").code == 0
    assert parameters(tmp_path / "run") == parameters(finished)


def test_text_is_prepared_anew_after_a_stop_and_nothing_half_done_stays(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("an island and an island " * 200)
    words = ["simulate", spec, "--set", f"data.path={tmp_path / 'data'}", "--set", f'data.inputs=["{tmp_path / "text.txt"}"]']
    with monkeypatch.context() as patch:
        patch.setattr(RunDisplay, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        ended = isles(*words, "--set", "data.held_out=0.2", "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (143, "")
    assert not (tmp_path / "data").exists()
    assert isles(*command_after(ended.err), "--quiet").code == 0


def test_data_prepare_leaves_nothing_half_done_when_stopped(
    isles: Isles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("an island and an island " * 200)
    with monkeypatch.context() as patch:
        patch.setattr("isles.watch.PrepareDisplay.update", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        ended = isles("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "data")
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (130, "", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_ends_a_session_is_heard_and_handed_back(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        with stop_on_signals() as stop:
            assert not stop()
            os.kill(os.getpid(), number)
            assert stop()
            assert stop.exit_code == 128 + number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_that_never_came_lets_work_go_on() -> None:
    Stop().check("never said")


# --- models


def test_a_run_can_be_moved_sampled_and_exported(
    isles: Isles, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "it's [b] ö")
    monkeypatch.chdir(moved)
    words = ["--prompt", "[/x] :bug: \udcff", "--max-tokens", "5", "--json"]
    text = isles("sample", ".", *words).json["text"]
    assert str(text).startswith("[/x] :bug: ?")
    assert isles("export", ".", "--out", "hf").code == 0
    assert isles("sample", "hf", *words).json["text"] == text
    assert isles("export", ".", "--out", "hf", "--checkpoint", "8", "--json").json["step"] == 8  # an export may be replaced
    assert isles("sample", ".", "--checkpoint", "9").is_mistake(7)


@pytest.mark.parametrize("baseline", ["ddp", "single"])
def test_a_baseline_can_be_sampled_and_exported(baseline: str, isles: Isles, spec: Path, tmp_path: Path) -> None:
    assert isles("simulate", spec, "--baseline", baseline, "--set", "run.steps=3", "--out", tmp_path / "b", "--quiet").code == 0
    assert isles("export", tmp_path / "b", "--out", tmp_path / "hf").code == 0
    assert isles("sample", tmp_path / "hf", "--max-tokens", "2").code == 0


def test_an_export_replaces_nothing_but_an_export(
    isles: Isles, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text("{}")
    (project / "src" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    isles("export", finished, "--out", project).is_mistake(2)
    isles("export", finished, "--out", tmp_path / "file").is_mistake(2)
    isles("export", finished, "--out", tmp_path / "file" / "x").is_mistake(5)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    isles("export", finished, "--out", ".").is_mistake(2)
    assert contents(tmp_path) == before
