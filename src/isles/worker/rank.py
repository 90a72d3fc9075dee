"""What one rank of a cluster's workers does when it is told to, and how rank 0 has all of them do it.

Rank 0 alone speaks with the agent. Everything that concerns the model it does through a `Crew`, which tells the other ranks first: they
`follow`. A command that touches a file ends when all ranks are done, so that the agent is never told of what only some have written.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from isles.data import Dataset, open_or_prepare, sample_ids
from isles.model import Layout, build_model
from isles.spec import Spec, spec_from
from isles.worker.link import Range
from isles.worker.loop import Loop, StepResult, Trainer, choose_device
from isles.worker.memory import SharedParameters
from isles.worker.parameters import FlatView, ShardParameters
from isles.worker.ranks import Ranks, lost
from isles.worker.saved import SavedState
from isles.worker.session import Parameters

log = logging.getLogger("isles.worker")

Floats = NDArray[np.float32]
_UNFINISHED = ("step", "rewarm")  # commands that end without waiting for the others: the next step's collectives do


class ClusterRecord:
    """What `cluster.json` in a cluster's folder says to its workers."""

    def __init__(self, folder: Path) -> None:
        record: dict[str, Any] = json.loads((folder / "cluster.json").read_text())
        self.spec: Spec = spec_from(record["spec"], source=str(folder / "cluster.json"))
        self.base = Path(record["base"])


class Rank:
    """The run's model, or a rank's share of it, on the run's data.

    folder: the cluster's. ranks: the group that this process is in; None when it is alone. Raises IslesError for what the run's spec, data
    and model can be wrong in."""

    def __init__(self, folder: Path, record: ClusterRecord, ranks: Ranks | None = None) -> None:
        self.folder, self.spec, self.ranks = folder, record.spec, ranks
        self.number, self.size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
        _set_threads(self.spec, self.size)
        self.dataset = _open_data(self.spec, record.base, ranks)
        model = build_model(
            self.spec.model, vocab_size=self.dataset.vocab_size, sequence_length=self.spec.data.sequence_length,
            seed=self.spec.run.seed, base=record.base,
        )  # fmt: skip
        self.layout = Layout.of(model, self.spec.streaming.fragments, self.spec.streaming.order)
        self.trainer: Loop
        self.parameters: Parameters
        if ranks is None:
            trainer = Trainer(model, self.layout, self.spec, choose_device(self.spec.train.device))
            self.trainer, self.parameters = trainer, FlatView(trainer.flat.values)
        else:
            from isles.worker.parallel import ShardedTrainer  # a second to import, which one rank can do without

            sharded = ShardedTrainer(model, self.layout, self.spec, ranks)
            self.trainer, self.parameters = sharded, ShardParameters(sharded.shards)
        self.saved = SavedState(folder / "worker" / f"rank-{self.number}.safetensors", self.size)
        self._agree_on_saved()
        self._shared: SharedParameters | None = None

    def step(self, ranges: list[Range], at: int) -> StepResult:
        """Train the samples of these stream positions, of which this rank takes its even share."""
        positions = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])
        share = positions.size // self.size
        own = positions[self.number * share : (self.number + 1) * share]
        return self.trainer.step(self.dataset.batch(sample_ids(own, len(self.dataset), self.spec.run.seed)), at)

    def rewarm(self, at: int, length: int) -> None:
        self.trainer.rewarm(at, length)

    def save(self, schedule: dict[str, Any]) -> None:
        """Raises CheckpointError when the disk refuses."""
        self.saved.write(self.trainer, schedule)
        if self.ranks is not None:
            self.ranks.together()  # so that a crash leaves all ranks with the old state, or all with the new
        self.saved.keep()

    def load(self) -> dict[str, Any]:
        """Go on from the saved state; returns the schedule's. Raises CheckpointError."""
        return self.saved.load(self.trainer)

    def load_inner(self) -> None:
        """Moments and step counts only, where there are any."""
        self.saved.load_inner(self.trainer)

    def change(self, how: str, which: str, start: int, stop: int, *more: float) -> None:
        """Do what `session.Parameters` names `how` with a vector of the mapped file: globals or sent."""
        if self._shared is None:
            self._shared = SharedParameters(self.folder / "parameters.f32", self.layout.total)
        getattr(self.parameters, how)(getattr(self._shared, which), start, stop, *more)

    def _agree_on_saved(self) -> None:
        """A state that not all ranks have of the same moment is none."""
        if self.ranks is None:
            return
        records = self.ranks.gather(self.saved.schedule())
        if any(record != records[0] for record in records):
            self.saved.forget()
            if self.number == 0:
                log.warning("the ranks' saved states are not of the same step; moments begin anew")


class Member(Protocol):
    """One process of a crew; it has the methods that the crew is told to call."""

    @property
    def ranks(self) -> Ranks | None: ...


class Crew:
    """All ranks, told by rank 0, which is `rank`. Methods are those of `Rank`. All raise NetworkError when a rank is gone."""

    def __init__(self, rank: Member) -> None:
        self.rank = rank

    def step(self, ranges: list[Range], at: int) -> StepResult:
        result: StepResult = self._all("step", ranges, at)
        return result

    def rewarm(self, at: int, length: int) -> None:
        self._all("rewarm", at, length)

    def save(self, schedule: dict[str, Any]) -> None:
        self._all("save", schedule)

    def load(self) -> dict[str, Any]:
        schedule: dict[str, Any] = self._all("load")
        return schedule

    def load_inner(self) -> None:
        self._all("load_inner")

    def change(self, how: str, which: str, start: int, stop: int, *more: float) -> None:
        self._all("change", how, which, start, stop, *more)

    def call(self, name: str, *arguments: Any) -> None:
        """Have every rank do what its method `name` does."""
        self._all(name, *arguments)

    def end(self, *words: Any) -> None:
        """Let the other ranks end, with these words."""
        if self.rank.ranks is not None:
            self.rank.ranks.tell(["end", *words])

    def _all(self, name: str, *arguments: Any) -> Any:
        ranks = self.rank.ranks
        if ranks is None:
            return getattr(self.rank, name)(*arguments)
        ranks.tell([name, *arguments])
        with lost():
            result = getattr(self.rank, name)(*arguments)
        if name not in _UNFINISHED:
            ranks.together()
        return result


def follow(rank: Member) -> list[Any]:
    """Do what rank 0 says until it says to end; returns what it says with that. Raises NetworkError when it is gone."""
    assert rank.ranks is not None
    while True:
        name, *arguments = rank.ranks.hear()
        if name == "end":
            return list(arguments)
        with lost():
            getattr(rank, name)(*arguments)
        if name not in _UNFINISHED:
            rank.ranks.together()


class Opened(Protocol):
    """Who knows the mapped file's vectors: a session."""

    @property
    def shared(self) -> SharedParameters | None: ...


class CrewParameters:
    """The parameters of all ranks, as a session's `Parameters`. Its vectors must be those of the mapped file, and are told by name.

    `session` has to be set before the first use."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.session: Opened | None = None

    def write_out(self, vector: Floats, start: int, stop: int) -> None:
        self._crew.change("write_out", self._name(vector), start, stop)

    def read_in(self, vector: Floats, start: int, stop: int) -> None:
        self._crew.change("read_in", self._name(vector), start, stop)

    def subtract(self, vector: Floats, start: int, stop: int) -> None:
        self._crew.change("subtract", self._name(vector), start, stop)

    def add(self, vector: Floats, start: int, stop: int) -> None:
        self._crew.change("add", self._name(vector), start, stop)

    def mix(self, vector: Floats, start: int, stop: int, alpha: float) -> None:
        self._crew.change("mix", self._name(vector), start, stop, alpha)

    def _name(self, vector: Floats) -> str:
        shared = self.session.shared if self.session is not None else None
        if shared is not None and vector is shared.globals:
            return "globals"
        if shared is not None and vector is shared.sent:
            return "sent"
        raise ValueError("several ranks can only reach the vectors of the file that they share with the agent")


def _open_data(spec: Spec, base: Path, ranks: Ranks | None) -> Dataset:
    """Prepared, where it has to be, by rank 0 alone."""
    if ranks is not None and ranks.rank > 0:
        ranks.together()
    dataset = open_or_prepare(spec.data, base)
    if ranks is not None and ranks.rank == 0:
        ranks.together()
    return dataset


def _set_threads(spec: Spec, ranks: int) -> None:
    if spec.train.threads:
        torch.set_num_threads(spec.train.threads)
    elif ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
