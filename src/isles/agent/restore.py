"""From a cluster's disk to its outer state: the model's beginning, or the newest checkpoint and the rounds since."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from isles.agent.folder import ClusterFolder, ClusterSettings
from isles.agent.journal import Journal
from isles.agent.scripted import read_layout
from isles.agent.state import OuterState
from isles.codec import Codec, get_codec
from isles.data import Dataset, open_or_prepare
from isles.errors import CheckpointError, SpecError, UsageError
from isles.exchange.spool import Averages
from isles.model import FlatParameters, Layout, build_model
from isles.simulator.folder import run_digest
from isles.spec import Spec
from isles.worker.checkpoint import Checkpoint, CheckpointStore, DamagedError
from isles.worker.memory import SharedParameters

log = logging.getLogger("isles.agent")


@dataclass
class Restored:
    """A cluster's state as its disk has it. dataset: None when a script brings it. step: of the run, at the last checkpoint."""

    dataset: Dataset | None
    layout: Layout
    codec: Codec
    state: OuterState
    journal: Journal
    checkpoints: CheckpointStore
    step: int = 0


def check_spec(spec: Spec) -> None:
    """What works in the simulator and not yet between machines. Raises SpecError."""
    for key, value, refused, others in (
        ("streaming.merge", spec.streaming.merge, "eager", "keep or mix"),
        ("outer.merge", spec.outer.merge, "radial", "mean"),
        ("clusters.join_state", spec.clusters.join_state, "peer", "fresh"),
        ("clusters.pace", spec.clusters.pace, "scale", "wait or train"),
    ):
        if value == refused:
            raise SpecError(f"{key} '{value}' works in `isles simulate` only; use {others} between real clusters")
    if spec.clusters.events or spec.clusters.speeds:
        raise SpecError(
            "clusters.events and clusters.speeds play unequal clusters in `isles simulate`; real ones come, leave and are slow by themselves"
        )
    if spec.streaming.overlap >= min([spec.train.local_steps, *(h for _, h in spec.train.local_steps_schedule)]):
        raise SpecError("streaming.overlap must be shorter than a round between real clusters")


def restore(folder: ClusterFolder, settings: ClusterSettings) -> Restored:
    """Bring the outer state up from the disk. Raises SpecError, DataError, ModelError, DiskError, CheckpointError."""
    spec = settings.spec
    check_spec(spec)
    dataset, model = (None, None) if spec.model.module is not None else _built(spec, Path(settings.base))
    layout = read_layout(folder) if model is None else Layout.of(model, spec.streaming.fragments, spec.streaming.order)
    if model is None and not folder.shared.exists():
        raise UsageError(f"{folder.path} holds no parameters of a script's model; start the script, which makes them")
    codec = get_codec(spec.codec)
    shared = SharedParameters(folder.shared, layout.total, create=True)
    residual = np.zeros(layout.total, np.float32) if codec.needs_residual else None
    # beside the mapped file: workers that outlived an agent may be reading there, and must see no earlier round
    state = OuterState(layout, spec.outer, np.empty(layout.total, np.float32), shared.sent, residual)
    digest = run_digest(spec, "none", "" if dataset is None else dataset.digest, layout)
    checkpoints = CheckpointStore(folder.checkpoints, run_digest=digest, keep=spec.checkpoint.keep)
    journal = Journal(folder.journal, len(layout.fragments))
    made = Restored(dataset, layout, codec, state, journal, checkpoints)
    saved = newest_sound(checkpoints)
    if saved is not None:
        state.load(saved.tensors["global"], [int(n) for n in saved.state["applied"]])
        if residual is not None and "residual" in saved.tensors:
            np.copyto(residual, saved.tensors["residual"]["residual"].numpy())
        made.step = saved.step
    elif model is not None:
        state.begin(FlatParameters(model, layout).values.detach().numpy())
    else:  # saved at once: others may have to begin with it, and the script does not say it twice
        state.begin(shared.globals)
        for rows in journal.fragments:
            rows.applied = []  # without a checkpoint nobody knows which of them these parameters hold
        record = {"applied": [0] * len(state.fragments), "digests": [f.digest for f in state.fragments]}
        checkpoints.save(0, record, {"global": state.tensors()})
    before = [f.applied for f in state.fragments]
    replay(state, journal, Averages(folder.exchange / "averages"))
    for index, (start, stop) in enumerate(layout.fragments):
        if residual is not None and state.fragments[index].applied > before[index]:
            residual[start:stop] = 0  # it is of the checkpoint's round; what was left out since is lost, and nothing goes twice
    state.move_to(shared.globals)
    return made


def newest_sound(checkpoints: CheckpointStore) -> Checkpoint | None:
    """The newest checkpoint that the disk gives back whole; damaged ones are set aside. None: there is none, and the cluster begins as one that
    holds no state, which the others give it. Raises CheckpointError for one that is sound and of another run."""
    found = False
    while steps := checkpoints.steps():
        found = True
        try:
            return checkpoints.load(steps[-1])
        except DamagedError as error:
            log.warning("%s; the checkpoint is now %s, the one before is tried", error.what, checkpoints.set_aside(steps[-1]))
    if found:
        log.error(
            "no checkpoint in %s can be read; this cluster joins anew, the others give it their state", checkpoints.folder
        )
    return None


def _built(spec: Spec, base: Path) -> tuple[Dataset, torch.nn.Module]:
    dataset = open_or_prepare(spec.data, base)
    model: torch.nn.Module = build_model(
        spec.model, vocab_size=dataset.vocab_size, sequence_length=spec.data.sequence_length, seed=spec.run.seed, base=base
    )
    return dataset, model


def replay(state: OuterState, journal: Journal, averages: Averages) -> None:
    """Apply again what the journal names beyond the checkpoint, as far as its averages are on disk."""
    for index, fragment in enumerate(state.fragments):
        try:
            for row in journal.since(index, fragment.applied):
                state.apply(index, row.number, averages.checked(index, row.number, row.digest), shift=False)
        except CheckpointError as error:
            log.warning("%s; the others will be asked", error)
        rows = journal.fragments[index]
        rows.applied = [a for a in rows.applied if a.number <= fragment.applied]
