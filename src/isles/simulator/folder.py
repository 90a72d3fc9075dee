"""A run's folder: everything that a finished, interrupted or resumed run is read back from.

run.json          the spec as it was used, where paths count from, the baseline, vocabulary and layout
tokenizer/        the data's tokenizer, so that the folder can be sampled and exported alone
metrics.jsonl     one StepRecord a line
summary.json      one Summary
checkpoints/      see isles.worker.checkpoint
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from isles.errors import CheckpointError, UsageError
from isles.files import held
from isles.model import Layout, build_model
from isles.spec import Spec, spec_from
from isles.spec.digest import spec_digest
from isles.worker.checkpoint import CheckpointStore

FORMAT = 1
_UNFINISHED = (".tokenizer.writing", ".run.json.writing")  # all that a run leaves that is killed before its first step
_FIELDS = {"spec": dict, "base": str, "baseline": str, "vocab_size": int, "data_digest": str, "layout": dict}


@dataclass(frozen=True)
class RunFolder:
    """A folder that belongs to one run."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def checkpoints(self, run_digest: str, keep: int) -> CheckpointStore:
        return CheckpointStore(self.path / "checkpoints", run_digest=run_digest, keep=keep)

    def begin(self, *, resume: bool) -> None:
        """Check that the folder may be written: new for a new run, with a run in it for a resumed one. Raises UsageError."""
        exists = (self.path / "run.json").exists()
        if resume and not exists:
            raise UsageError(f"{self.path} holds no run to resume; start it without --resume")
        if exists and not resume:
            raise UsageError(f"{self.path} already holds a run; go on with it with --resume, or choose another --out")
        if not exists and self.path.is_dir() and any(path.name not in _UNFINISHED for path in self.path.iterdir()):
            raise UsageError(f"{self.path} is not empty and holds no run; choose another --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made ({error.strerror}); choose another --out") from error

    def write_run(
        self, *, spec: Spec, base: Path, baseline: str, vocab_size: int, layout: Layout, data_digest: str, tokenizer: Path
    ) -> None:
        """Record what the run is, before its first step. A resumed run calls it too, which mends a damaged record."""
        record = {
            "format": FORMAT,
            "spec": spec.model_dump(mode="json", exclude_none=True),
            "base": str(base.resolve()),
            "baseline": baseline,
            "vocab_size": vocab_size,
            "data_digest": data_digest,
            "layout": layout.to_dict(),
        }
        try:
            self._write(json.dumps(record, indent=1), tokenizer)
        except OSError as error:
            why = error.strerror or error.args[0][0][2]  # copytree collects what its files met
            raise CheckpointError(f"{self.path} cannot be written ({why}); free some space, or choose another --out") from error

    def _write(self, record: str, tokenizer: Path) -> None:
        """Both whole or not at all. The record goes first: by it the folder is known as ours, whenever this is killed."""
        copied, written = (self.path / name for name in _UNFINISHED)
        shutil.rmtree(copied, ignore_errors=True)
        if tokenizer.is_dir() and not self.tokenizer.exists():
            shutil.copytree(tokenizer, copied)
        written.write_text(record)
        written.replace(self.path / "run.json")
        if copied.exists():
            copied.rename(self.tokenizer)

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes from working in the folder meanwhile. Raises UsageError when one does."""
        return held(self.path)

    def read_run(self) -> dict[str, Any]:
        """What `write_run` recorded. Raises UsageError when this is no run folder, CheckpointError when it is damaged."""
        path = self.path / "run.json"
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            version = record["format"]
            complete = version != FORMAT or all(isinstance(record[key], kind) for key, kind in _FIELDS.items())
        except FileNotFoundError as error:
            raise UsageError(
                f"{self.path} is no run's folder: it has no run.json; name the --out of `isles simulate`"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); `isles simulate` with --resume writes it again") from error
        if version != FORMAT:
            raise CheckpointError(
                f"{path} is of format {version}, this isles reads format {FORMAT}; use the isles that wrote it"
            )
        if not complete:
            raise CheckpointError(f"{path} is damaged; `isles simulate` with --resume writes it again")
        return record

    def digest(self) -> str:
        """What the checkpoints of this run carry."""
        record = self.read_run()
        spec = spec_from(record["spec"], source=str(self.path / "run.json"))
        return run_digest(spec, record["baseline"], record["data_digest"], Layout.from_dict(record["layout"]))

    def load_model(self, step: int | None = None) -> tuple[torch.nn.Module, torch.Tensor, int]:
        """The run's model, its global parameters (fp32, shape [layout.total]) and the step they are from.

        The model holds freshly initialised weights; the caller lays the values over it. Raises CheckpointError."""
        record = self.read_run()
        spec = spec_from(record["spec"], source=str(self.path / "run.json"))
        checkpoint = self.checkpoints(self.digest(), spec.checkpoint.keep).load(step)
        model = build_model(
            spec.model,
            vocab_size=record["vocab_size"],
            sequence_length=spec.data.sequence_length,
            seed=spec.run.seed,
            base=Path(record["base"]),
        )
        return model, checkpoint.tensors["global"]["values"], checkpoint.step


def run_digest(spec: Spec, baseline: str, data_digest: str, layout: Layout) -> str:
    """What a checkpoint must share with the run that loads it."""
    return blake3("/".join([spec_digest(spec), baseline, data_digest, layout.digest()]).encode()).hexdigest()
