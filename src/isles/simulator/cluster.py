"""One simulated cluster: a real trainer, its share of the data, and where it stands in each fragment's round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isles.data import Dataset, Ledger, sample_ids
from isles.outer import LocalFragment
from isles.spec import Spec
from isles.worker import StepResult, Trainer

Floats = NDArray[np.float32]


class SampleStream:
    """A cluster's claimed ranges of the data order, handed out batch by batch. The ledger is the only record of them."""

    def __init__(self, dataset: Dataset, ledger: Ledger, cluster: str, seed: int) -> None:
        self._dataset, self._ledger, self._cluster, self._seed = dataset, ledger, cluster, seed

    def batch(self, size: int, *, round_number: int, claim: int) -> NDArray[np.int64]:
        """The next `size` sequences, int64, shape [size, sequence_length + 1]; claims `claim` more positions when short."""
        positions: list[NDArray[np.int64]] = []
        missing = size
        while missing:
            held = self._ledger.held(self._cluster) or self._ledger.claim(self._cluster, round_number, max(claim, missing))
            first = held[0].start
            last = min(first + missing, held[0].stop)
            self._ledger.use(self._cluster, first, last)
            positions.append(np.arange(first, last, dtype=np.int64))
            missing -= last - first
        ids = sample_ids(np.concatenate(positions), len(self._dataset), self._seed)
        return self._dataset.batch(ids)

    def release(self) -> None:
        """Give back what was claimed and not trained."""
        self._ledger.leave(self._cluster)


@dataclass
class Standing:
    """Where a cluster stands in one fragment's current round."""

    local: LocalFragment
    since_sent: int = 0  # local steps since its own last contribution
    tokens: int = 0  # trained in them
    since_close: int = 0  # local steps since the round before closed, whether or not it took part


@dataclass
class Cluster:
    """A cluster of the simulated run."""

    number: int
    trainer: Trainer
    stream: SampleStream
    standings: list[Standing]
    speed: float = 1.0
    active: bool = True
    residual: Floats | None = None  # error feedback, over the whole flat layout
    credit: float = field(default=0.0)  # share of a local step earned but not taken, for speeds below 1

    @property
    def name(self) -> str:
        return f"cluster-{self.number:04d}"

    def step(self, at: int, spec: Spec, round_number: int) -> StepResult:
        """One local step at the run's step `at`."""
        size = spec.train.batch_size
        batch = self.stream.batch(size, round_number=round_number, claim=size * spec.train.local_steps_at(at))
        result = self.trainer.step(batch, at)
        for standing in self.standings:
            standing.since_sent += 1
            standing.since_close += 1
            standing.tokens += result.tokens
        return result

    def enter(self, values: Floats, peer: Cluster | None, at: int, warmup: int) -> None:
        """Join at a round's edge: the global parameters, and a peer's inner state or a fresh one with a warm-up."""
        self.trainer.write(0, values)
        self.trainer.reset_inner_state()
        if peer is not None:
            self.trainer.load_inner_state(peer.trainer.state_tensors())
        else:
            self.trainer.rewarm(at, warmup)
        for standing in self.standings:
            standing.local.reset()
            standing.since_sent = standing.tokens = standing.since_close = 0
        if self.residual is not None:
            self.residual[:] = 0
        self.active, self.credit = True, 0.0

    def leave(self) -> None:
        self.stream.release()
        self.active = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint of this cluster."""
        named = dict(self.trainer.state_tensors())
        for i, standing in enumerate(self.standings):
            named |= {f"fragment.{i}.{name}": t for name, t in standing.local.state_dict().items()}
        if self.residual is not None:
            named["residual"] = torch.from_numpy(self.residual)
        return named

    def counters(self) -> dict[str, Any]:
        rows = [[s.since_sent, s.tokens, s.since_close] for s in self.standings]
        return {"active": self.active, "credit": self.credit, "standings": rows}

    def load(self, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
        self.trainer.load_state_tensors(tensors)
        self.active, self.credit = counters["active"], counters["credit"]
        for i, (standing, row) in enumerate(zip(self.standings, counters["standings"], strict=True)):
            standing.since_sent, standing.tokens, standing.since_close = row
            prefix = f"fragment.{i}."
            standing.local.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        if self.residual is not None:
            np.copyto(self.residual, tensors["residual"].numpy())
