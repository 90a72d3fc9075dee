"""The local state of a worker's rank on disk: parameters, inner optimizer, and where in its rounds it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from isles.errors import CheckpointError
from isles.files import sync
from isles.worker.loop import Loop

log = logging.getLogger("isles.worker")


class SavedState:
    """In a file that is whole or not there, of one of `ranks` ranks. A state of another number of ranks is split in another way: it is none."""

    def __init__(self, path: Path, ranks: int = 1) -> None:
        self.path, self.ranks = path, ranks
        self._temporary = path.with_name(f".{path.name}.writing")
        self._forgotten = False
        metadata = self._metadata()
        if metadata is not None and metadata[1] != ranks:
            log.warning("the saved state %s is of %d ranks and there are %d now; moments begin anew", path, metadata[1], ranks)
            self.forget()

    def rounds(self) -> tuple[int, ...] | None:
        """The rounds that the saved state goes with; None when there is none that can be read."""
        record = self.schedule()
        return None if record is None else tuple(int(row[-1]) for row in record["fragments"])

    def ranges(self) -> list[tuple[int, int]]:
        """The samples trained in the saved state since the last round of fragment 0, in which samples are counted."""
        record = self.schedule()
        return [] if record is None else [(int(a), int(b)) for a, b in record["fragments"][0][3]]

    def schedule(self) -> dict[str, Any] | None:
        """The saved schedule; None when there is none that can be read."""
        metadata = None if self._forgotten else self._metadata()
        return None if metadata is None else metadata[0]

    def forget(self) -> None:
        """From now on what is there counts as none; the next one that is saved takes its place."""
        self._forgotten = True

    def _metadata(self) -> tuple[dict[str, Any], int] | None:
        """The schedule and the number of ranks."""
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata()
                return json.loads(metadata["schedule"]), int(metadata.get("ranks", 1))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def write(self, trainer: Loop, schedule: dict[str, Any]) -> None:
        """Put a state beside the one that counts, until `keep`. Raises CheckpointError when the disk refuses."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.state_tensors().items()}
            save_file(tensors, self._temporary, metadata={"schedule": json.dumps(schedule), "ranks": str(self.ranks)})
            sync(self._temporary)
        except (OSError, SafetensorError) as error:
            raise self._refused(error) from error

    def keep(self) -> None:
        """Let what `write` wrote count. Raises CheckpointError."""
        try:
            self._temporary.replace(self.path)
            self._forgotten = False
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> CheckpointError:
        self._temporary.unlink(missing_ok=True)
        return CheckpointError(f"the worker's state cannot be written to {self.path} ({error}); free some space")

    def load(self, trainer: Loop) -> dict[str, Any]:
        """The whole local state; returns the schedule's. Raises CheckpointError."""
        record = self.schedule()
        if record is None:
            raise CheckpointError(f"{self.path} cannot be read; remove it, and the cluster begins from the global parameters")
        trainer.load_state_tensors(self._tensors())
        return record

    def load_inner(self, trainer: Loop) -> None:
        """Moments and step counts only, where there are any."""
        if self.schedule() is not None:
            trainer.load_inner_state(self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
