"""Checkpoints: whole or absent, verified, and the previous one is never lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from isles.agent.restore import newest_sound
from isles.errors import CheckpointError
from isles.worker.checkpoint import CheckpointStore

TENSORS = {"global": {"values": torch.arange(1000, dtype=torch.float32)}, "empty": {}}


def _store(path: Path, **kwargs: object) -> CheckpointStore:
    return CheckpointStore(
        path / "checkpoints", run_digest=str(kwargs.pop("run_digest", "abc")), keep=int(kwargs.pop("keep", 2))
    )  # type: ignore[call-overload]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.save(5, {"a": [1, 2.5, None]}, TENSORS)
    loaded = store.load()
    assert loaded.step == 5 and loaded.state == {"a": [1, 2.5, None]}
    assert torch.equal(loaded.tensors["global"]["values"], TENSORS["global"]["values"]) and loaded.tensors["empty"] == {}


def test_the_newest_is_loaded_and_the_oldest_go(tmp_path: Path) -> None:
    store = _store(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(step, {"step": step}, TENSORS)
    assert store.steps() == [2, 10] and store.load().step == 10 and store.load(2).state == {"step": 2}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.save(1, {"n": 1}, TENSORS)
    store.save(1, {"n": 2}, TENSORS)
    assert store.load().state == {"n": 2}


def test_a_kill_while_a_step_is_saved_again_leaves_one_of_the_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    store.save(1, {"n": 1}, TENSORS)
    rename, renamed = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        renamed.append(target)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(1, {"n": 2}, TENSORS)
    assert store.steps() == [1] and _store(tmp_path).load().state == {"n": 1} and store.describe(1).state == {"n": 1}
    store.save(1, {"n": 3}, TENSORS)
    assert store.load().state == {"n": 3} and [p.name for p in store.folder.iterdir()] == ["step-000000001"]


def test_an_agent_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for step in (1, 2):
        store.save(step, {"n": step}, TENSORS)
    (store.path(2) / "global.safetensors").write_bytes(b"damaged")
    assert newest_sound(store).step == 1
    assert store.steps() == [1], "offered to nobody, and no reason to drop a sound one"
    (store.path(1) / "manifest.json").unlink()
    assert newest_sound(store) is None and store.steps() == []
    store.save(1, {}, TENSORS)
    assert [p.name for p in store.folder.iterdir()] == ["step-000000001"]


def test_a_sound_checkpoint_of_another_run_is_not_passed_over(tmp_path: Path) -> None:
    _store(tmp_path, run_digest="other").save(1, {}, TENSORS)
    with pytest.raises(CheckpointError, match="another run"):
        newest_sound(_store(tmp_path))
    assert _store(tmp_path).steps() == [1]


def test_leftovers_of_a_killed_write_are_no_checkpoint_and_go(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.save(1, {}, TENSORS)
    leftover = store.folder / ".writing-000000002-99999"
    leftover.mkdir()
    (leftover / "global.safetensors").write_bytes(b"half")
    assert store.steps() == [1]
    store.save(3, {}, TENSORS)
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["global.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_named_with_the_file_and_the_way_out(tmp_path: Path, name: str, damage: str) -> None:
    store = _store(tmp_path)
    store.save(1, {"x": 1}, TENSORS)
    store.save(2, {"x": 2}, TENSORS)
    path = store.path(2) / name
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    else:
        path.unlink()
    if name == "manifest.json" and damage == "flip":
        path.write_text(path.read_text().replace('"bytes"', '"bites"'))
    with pytest.raises(CheckpointError) as caught:
        store.load()
    assert str(path) in str(caught.value) and "--checkpoint 1" in str(caught.value)
    assert store.load(1).state == {"x": 1}


def test_another_runs_or_formats_checkpoint_is_refused(tmp_path: Path) -> None:
    _store(tmp_path).save(1, {}, TENSORS)
    with pytest.raises(CheckpointError, match="another run"):
        _store(tmp_path, run_digest="other").load()
    manifest = _store(tmp_path).path(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(CheckpointError, match="format 99"):
        _store(tmp_path).load()


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        _store(tmp_path).load()
    _store(tmp_path).save(1, {}, TENSORS)
    with pytest.raises(CheckpointError, match="of step 7; it has 1"):
        _store(tmp_path).load(7)


def test_a_full_disk_leaves_the_previous_one_and_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    store.save(1, {"x": 1}, TENSORS)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("isles.worker.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, {}, TENSORS)
    assert store.load().state == {"x": 1} and [p.name for p in store.folder.iterdir()] == ["step-000000001"]


WRITER = """
import sys, torch
from pathlib import Path
from isles.worker.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), run_digest="abc")
step = 0
while True:
    step += 1
    store.save(step, {"step": step}, {"global": {"values": torch.full((300_000,), float(step))}})
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for delay in (0.0, 0.011, 0.023):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for _ in range(2):
                    said = int(process.stdout.readline())
                time.sleep(delay)
            finally:
                process.send_signal(signal.SIGKILL)
        loaded = CheckpointStore(folder, run_digest="abc").load()
        assert loaded.step >= said and torch.all(loaded.tensors["global"]["values"] == loaded.state["step"])
