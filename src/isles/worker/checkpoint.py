"""Checkpoints that a crash cannot take: folders that appear whole or not at all, verified when they are read.

    checkpoints/step-000000600/
        manifest.json         format version, run digest, size and blake3 of every file
        state.json            counters and positions
        NAME.safetensors      tensors

A checkpoint is written into a temporary folder, every file synced to disk, and the folder renamed; only then do older ones go.
A write that is killed at any moment therefore leaves the previous checkpoint as it was. Tensors are safetensors, state is JSON:
nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from isles.errors import CheckpointError
from isles.files import sync

FORMAT = 1
_BEFORE = ".before"  # after the name of a checkpoint that another of the same step takes the place of
_FOLDER = re.compile(rf"^step-(\d{{9}})(?:{re.escape(_BEFORE)})?$")
_TEMPORARY = ".writing-"
_DAMAGED = "damaged-"


class DamagedError(CheckpointError):
    """A checkpoint of this run that is not as it was written. what: without the hint for a person who resumes by hand."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what + instead)
        self.what = what


@dataclass(frozen=True)
class Checkpoint:
    """A loaded and verified checkpoint. tensors: file name (without suffix) -> tensor name -> tensor on the CPU."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Description:
    """state: counters and positions. files: name -> {"bytes", "blake3"}."""

    state: dict[str, Any]
    files: dict[str, dict[str, Any]]


class CheckpointStore:
    """The checkpoints of one run in one folder.

    run_digest: digest of what must not change between writing and reading (the spec and the layout). keep: how many stay."""

    def __init__(self, folder: Path, *, run_digest: str, keep: int = 2) -> None:
        self.folder, self.run_digest, self.keep = folder, run_digest, keep

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, rising."""
        if not self.folder.is_dir():
            return []
        return sorted({int(match[1]) for path in self.folder.iterdir() if (match := _FOLDER.match(path.name))})

    def path(self, step: int) -> Path:
        final, before = self._folders(step)
        return before if before.exists() and not final.exists() else final

    def _folders(self, step: int) -> tuple[Path, Path]:
        """Of a checkpoint, and of an earlier one of the same step while the new one takes its place."""
        final = self.folder / f"step-{step:09d}"
        return final, final.with_name(final.name + _BEFORE)

    def save(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, torch.Tensor]], *, spare: Container[int] = ()
    ) -> Path:  # fmt: skip
        """Write a checkpoint durably, then drop the oldest beyond `keep`, but for those of the steps in `spare`. Raises CheckpointError when
        the disk refuses."""
        temporary = self.folder / f"{_TEMPORARY}{step:09d}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            temporary.mkdir()
            for name, named in tensors.items():
                save_file({k: v.detach().cpu().contiguous() for k, v in named.items()}, temporary / f"{name}.safetensors")
            (temporary / "state.json").write_text(json.dumps(state))
            files = {p.name: {"bytes": p.stat().st_size, "blake3": _digest(p)} for p in sorted(temporary.iterdir())}
            manifest = {"format": FORMAT, "step": step, "run": self.run_digest, "files": files}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in temporary.iterdir():
                sync(path)
            sync(temporary)
            final, before = self._folders(step)
            if final.exists():  # there is a whole one at every moment
                shutil.rmtree(before, ignore_errors=True)
                final.rename(before)
            temporary.rename(final)
            sync(self.folder)
            for folder in (before, *self.folder.glob(f"{_DAMAGED}*")):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.folder}: {error}; earlier ones are untouched, free some space and resume"
            ) from error
        for old in self.steps()[: -self.keep]:
            for folder in self._folders(old) if old not in spare else ():
                shutil.rmtree(folder, ignore_errors=True)
        return final

    def load(self, step: int | None = None) -> Checkpoint:
        """Read and verify a checkpoint, the newest when no step is named.

        Raises CheckpointError that names the file and what is wrong with it: missing, cut, altered, of another format or run."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} holds no checkpoint; the run was stopped before it saved its first one")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise CheckpointError(f"{self.folder} holds no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        folder = self.path(step)
        manifest = self._manifest(folder, steps)
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        state: dict[str, Any] = {}
        for name, expected in manifest["files"].items():
            path = folder / Path(name).name
            self._verify(path, expected, steps)
            if path.suffix == ".safetensors":
                tensors[path.stem] = load_file(path)
            else:
                state = json.loads(path.read_text())
        return Checkpoint(step, state, tensors)

    def set_aside(self, step: int) -> Path:
        """Count a damaged checkpoint no more: it is offered to nobody and takes no sound one's place. It goes with the next that is saved.

        Raises CheckpointError."""
        folder = self.path(step)
        aside = self.folder / f"{_DAMAGED}{folder.name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is damaged and cannot be moved away ({error.strerror}); remove it, and start again"
            ) from error
        return aside

    def describe(self, step: int) -> Description:
        """What a checkpoint says of itself, without reading its tensors. Raises CheckpointError."""
        folder = self.path(step)
        files = self._manifest(folder, self.steps())["files"]
        try:
            return Description(json.loads((folder / "state.json").read_text()), files)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / 'state.json'} cannot be read ({error})") from error

    def _manifest(self, folder: Path, steps: list[int]) -> dict[str, Any]:
        path = folder / "manifest.json"
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            version, run, files = manifest["format"], manifest["run"], manifest["files"]
            whole = all(isinstance(f["bytes"], int) and isinstance(f["blake3"], str) for f in files.values())
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing", self._instead(folder, steps)) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} cannot be read ({error})", self._instead(folder, steps)) from error
        if version != FORMAT:
            raise CheckpointError(
                f"{path} is of format {version}, this isles reads format {FORMAT}; use the isles that wrote it"
            )
        if run != self.run_digest:
            raise CheckpointError(
                f"{path} belongs to another run: its spec, data or model differ from the one given; resume with the run.toml it was started with, or choose another --out"
            )
        if not whole:
            raise DamagedError(f"{path} lists files without size and hash", self._instead(folder, steps))
        return manifest

    def _verify(self, path: Path, expected: Mapping[str, Any], steps: list[int]) -> None:
        try:
            size = path.stat().st_size
            damage = f"has {size} bytes instead of {expected['bytes']}" if size != expected["bytes"] else None
            if damage is None and _digest(path) != expected["blake3"]:
                damage = "does not match its hash"
        except FileNotFoundError:
            damage = "is missing"
        except OSError as error:
            damage = f"cannot be read ({error})"
        if damage:
            raise DamagedError(f"{path} {damage}", self._instead(path.parent, steps))

    def _instead(self, folder: Path, steps: list[int]) -> str:
        """What a person can do about a damaged checkpoint."""
        others = [s for s in steps if self.path(s) != folder]
        if others:
            return f"; resume from the one before with --checkpoint {others[-1]}"
        return "; it is the only checkpoint of this run, so the run must start anew"

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


def _digest(path: Path) -> str:
    return blake3(max_threads=1).update_mmap(path).hexdigest()
