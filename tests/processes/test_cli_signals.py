"""Real processes that are interrupted, killed and cut off: what was saved goes on to the very same parameters."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isles import load_spec
from isles.simulator import RunFolder, records, simulate

STEPS = 120
ISLES = [sys.executable, "-c", "from isles.cli import main; main()"]
SPEC = """
[run]
steps = {steps}
[model]
family = "llama"
layers = 1
hidden_size = 32
heads = 2
[data]
path = "{data}"
sequence_length = 16
[train]
local_steps = 5
batch_size = 2
threads = 1
[optimizer]
warmup_steps = 2
[clusters]
count = 2
[eval]
every = 50
sequences = 4
[checkpoint]
every = 10
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def spec(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a spec") / "run.toml"
    path.write_text(SPEC.format(steps=STEPS, data=tiny_dataset))
    return path


@pytest.fixture(scope="module")
def uninterrupted(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    simulate(load_spec(spec), base=spec.parent, out=folder)
    return parameters(folder)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `isles` in a folder of its own; whatever still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str | Path, **pipes: int) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
        running.append(subprocess.Popen([*ISLES, *map(str, words)], cwd=tmp_path, text=True, **streams))  # type: ignore[call-overload]
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def parameters(folder: Path) -> bytes:
    """The global parameters of the newest checkpoint, byte for byte."""
    _, values, step = RunFolder(folder).load_model()
    assert step == STEPS
    return values.numpy().tobytes()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "nothing happened for a minute"
        time.sleep(0.005)


def steps_written(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def steps_of(folder: Path) -> list[int]:
    return [record.step for record in records(folder)]


def test_ctrl_c_saves_and_the_printed_command_ends_at_the_same_parameters(
    spec: Path, uninterrupted: bytes, start: Start, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    process = start("simulate", spec, "--set", "checkpoint.every=1000", "--out", "a run", "--quiet")
    wait_until(lambda: steps_written(run) >= 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert (process.returncode, out) == (130, "")
    assert len(err.splitlines()) == 1
    words = shlex.split(err.split("go on with: ")[1])
    _, err = start(*words[1:]).communicate(timeout=150)
    assert err == ""
    assert parameters(run) == uninterrupted
    assert steps_of(run) == list(range(1, STEPS + 1))


def test_kill_9_loses_no_more_than_the_steps_since_the_last_checkpoint(
    spec: Path, uninterrupted: bytes, start: Start, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start("simulate", spec, "--out", "run", "--quiet")
    wait_until(lambda: steps_written(run) >= 23, process)
    process.kill()
    process.wait()
    assert max(RunFolder(run).checkpoints("", 2).steps()) >= 20
    simulate(load_spec(spec), base=spec.parent, out=run, resume=True)
    assert parameters(run) == uninterrupted
    assert steps_of(run) == list(range(1, STEPS + 1))


def test_sigterm_saves_and_prints_one_json_object(spec: Path, uninterrupted: bytes, start: Start, tmp_path: Path) -> None:

    process = start("simulate", spec, "--out", "run", "--json")
    wait_until(lambda: steps_written(tmp_path / "run") >= 3, process)
    process.terminate()
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 143
    assert len(out.splitlines()) == 1
    assert json.loads(out)["complete"] is False
    assert json.loads(out)["resume"].startswith("isles simulate ")
    simulate(load_spec(spec), base=spec.parent, out=tmp_path / "run", resume=True)
    assert parameters(tmp_path / "run") == uninterrupted


def test_kill_9_while_text_is_prepared_leaves_nothing_in_the_way(spec: Path, start: Start, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("an island and an island\n" * 4_000_000)  # some seconds of work
    changes = ["--set", f'data.inputs=["{text}"]', "--set", f"data.path={tmp_path / 'data'}", "--set", "run.steps=5"]
    process = start("simulate", spec, *changes, "--out", "run", "--quiet")
    wait_until(lambda: (tmp_path / "data" / "train-00000.bin.partial").exists(), process)
    process.kill()
    process.wait()
    assert (tmp_path / "data" / ".preparing").exists()
    text.write_text("an island and an island\n" * 400)
    spec_now = load_spec(spec, changes[1::2])
    assert simulate(spec_now, base=spec.parent, out=tmp_path / "run").complete


def test_a_run_goes_on_when_nobody_reads_its_progress_or_result(
    spec: Path, uninterrupted: bytes, start: Start, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    process = start("simulate", spec, "--out", "run", stdout=writer, stderr=writer)  # `2>&1 | head -1`
    os.close(writer)
    os.close(reader)
    assert process.wait(timeout=150) == 141
    assert parameters(tmp_path / "run") == uninterrupted
