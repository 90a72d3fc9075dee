"""The built-in worker process: the run's model on the run's data, under a session.

    python -m isles.worker FOLDER

FOLDER is the cluster's: `cluster.json` names the spec and where its paths count from. The process saves its inner state when it is told to
stop and every `checkpoint.every` steps, so that one that is started again goes on with its AdamW moments.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from isles.data import Dataset, open_or_prepare, sample_ids
from isles.errors import CheckpointError, IslesError
from isles.model import Layout, build_model
from isles.spec import Spec, spec_from
from isles.worker.link import Range
from isles.worker.loop import Trainer, choose_device
from isles.worker.parameters import FlatView
from isles.worker.session import Session

log = logging.getLogger("isles.worker")


class Worker:
    """One worker of a cluster, of one rank."""

    def __init__(self, folder: Path) -> None:
        record: dict[str, Any] = json.loads((folder / "cluster.json").read_text())
        self.spec: Spec = spec_from(record["spec"], source=str(folder / "cluster.json"))
        base = Path(record["base"])
        if self.spec.train.threads:
            torch.set_num_threads(self.spec.train.threads)
        self.dataset: Dataset = open_or_prepare(self.spec.data, base)
        length = self.spec.data.sequence_length
        model = build_model(
            self.spec.model, vocab_size=self.dataset.vocab_size, sequence_length=length, seed=self.spec.run.seed, base=base
        )
        self.layout = Layout.of(model, self.spec.streaming.fragments, self.spec.streaming.order)
        self.trainer = Trainer(model, self.layout, self.spec, choose_device(self.spec.train.device))
        self.saved = SavedState(folder / "worker" / "rank-0.safetensors")
        self.session = Session(
            folder, FlatView(self.trainer.flat.values), self.spec, fragments=self.layout.fragments, layout=self.layout.digest(),
            saved=self.saved.rounds(),
        )  # fmt: skip
        self.signal = 0
        self.session.interrupted = lambda: bool(self.signal)

    def run(self) -> None:
        """Train until the run is over or somebody says to stop."""
        start = self.session.begin()
        if start is None:
            return
        if start.resume:
            self.session.schedule.load_dict(self.saved.load(self.trainer))
        else:
            self.saved.load_inner(self.trainer)
            if self.saved.rounds() is None:
                self.trainer.rewarm(start.step, start.warmup)
        log.info("training from step %d", self.session.step)
        every = self.spec.checkpoint.every
        while self.session.running:
            if not self._step():
                break
            if every and self.session.step % every == 0:
                self._save()
        self._save()
        self.session.end()

    def _step(self) -> bool:
        size, at = self.spec.train.batch_size, self.session.step
        ranges = self.session.claim(size, each=size * self.spec.train.local_steps_at(at))
        if ranges is None:
            return False
        result = self.trainer.step(self._batch(ranges), at)
        self.session.stepped(
            loss=float(result.loss), tokens=result.tokens, grad_norm=float(result.grad_norm), lr=result.lr, ranges=ranges
        )
        return True

    def _batch(self, ranges: list[Range]) -> NDArray[np.int64]:
        positions = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])
        return self.dataset.batch(sample_ids(positions, len(self.dataset), self.spec.run.seed))

    def _save(self) -> None:
        """Only between rounds: while a fragment is under way, a restart begins from the global parameters anyhow."""
        schedule = self.session.schedule
        if not any(f.flight for f in schedule.fragments):
            self.saved.save(self.trainer, schedule.to_dict())


class SavedState:
    """The local state of one rank in a file that is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rounds(self) -> tuple[int, ...] | None:
        """The rounds that the saved state goes with; None when there is none that can be read."""
        record = self._record()
        return None if record is None else tuple(int(row[-1]) for row in record["fragments"])

    def _record(self) -> dict[str, Any] | None:
        try:
            with safe_open(self.path, "pt") as file:
                record: dict[str, Any] = json.loads(file.metadata()["schedule"])
                return record
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def save(self, trainer: Trainer, schedule: dict[str, Any]) -> None:
        """Raises CheckpointError when the disk refuses."""
        temporary = self.path.with_name(f".{self.path.name}.writing")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.state_tensors().items()}
            save_file(tensors, temporary, metadata={"schedule": json.dumps(schedule)})
            temporary.replace(self.path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(f"the worker's state cannot be written to {self.path} ({error}); free some space") from error

    def load(self, trainer: Trainer) -> dict[str, Any]:
        """The whole local state; returns the schedule's. Raises CheckpointError."""
        record = self._record()
        if record is None:
            raise CheckpointError(f"{self.path} cannot be read; remove it, and the cluster begins from the global parameters")
        trainer.load_state_tensors(self._tensors())
        return record

    def load_inner(self, trainer: Trainer) -> None:
        """Moments and step counts only, where there are any."""
        if self._record() is not None:
            trainer.load_inner_state(self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def main(arguments: list[str]) -> int:
    """Exit code 0: done or stopped in order; otherwise that of the mistake."""
    logging.basicConfig(level=os.environ.get("ISLES_LOG", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(arguments) != 1:
        print("usage: python -m isles.worker FOLDER", file=sys.stderr)
        return 2
    try:
        worker = Worker(Path(arguments[0]))

        def note(number: int, _frame: object) -> None:
            worker.signal = number

        signal.signal(signal.SIGTERM, note)
        signal.signal(signal.SIGINT, note)
        worker.run()
    except IslesError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
