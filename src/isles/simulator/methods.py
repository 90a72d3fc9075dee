"""The training methods that a simulated run can follow: DiLoCo itself, and the baselines it is measured against.

All of them do local steps on the same samples with the same trainer; they differ in who trains on what and what crosses the
internet. The main loop in `research` drives any of them one tick at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from isles.codec import get_codec
from isles.data import Dataset, Ledger
from isles.model import Layout
from isles.outer import LocalFragment, OuterOptimizer, outer_optimizer
from isles.simulator.cluster import Cluster, SampleStream, Standing
from isles.simulator.rounds import Rounds, clock_counters, in_flight_tensors, load_clock
from isles.spec import Spec
from isles.worker import Trainer

Floats = NDArray[np.float32]
Tensors = dict[str, dict[str, torch.Tensor]]
Baseline = Literal["none", "ddp", "single"]


@dataclass(frozen=True)
class Tick:
    """What happened in one tick: means over the clusters that trained."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    clusters: int


class Method(Protocol):
    """A way of training. `values` are the parameters that are evaluated and exported, fp32, shape [layout.total]."""

    @property
    def name(self) -> str: ...

    @property
    def values(self) -> Floats: ...

    @property
    def bytes(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    def tick(self, at: int) -> Tick | None:
        """One tick at the run's step `at`; None when no cluster trained."""

    def finish(self) -> None:
        """The run has had its last step."""

    def state(self) -> tuple[dict[str, Any], Tensors]:
        """Counters (JSON) and tensors of a checkpoint."""

    def load(self, counters: dict[str, Any], tensors: Tensors) -> None:
        """Undo `state`."""


class Diloco:
    """M clusters in one process, synchronised by the rooms that a real run uses."""

    name = "diloco"

    def __init__(self, spec: Spec, make_trainer: Callable[[], Trainer], layout: Layout, dataset: Dataset) -> None:
        self.spec, self._ledger, self._now = spec, Ledger(len(dataset)), 0
        codec, table = get_codec(spec.codec), spec.clusters
        joins_later = {e.cluster for e in spec.clusters.events if e.kind == "join"} - self._leaves_before_joining()
        self.clusters = [
            Cluster(
                number=i,
                trainer=make_trainer(),
                stream=SampleStream(dataset, self._ledger, f"cluster-{i:04d}", spec.run.seed),
                standings=[Standing(self._local_fragment()) for _ in layout.fragments],
                speed=table.speeds[i] if table.speeds else 1.0,
                active=i not in joins_later,
                residual=np.zeros(layout.total, np.float32) if codec.needs_residual else None,
            )
            for i in range(table.count)
        ]
        self.values = self.clusters[0].trainer.read(0, layout.total).copy()
        self.outer: OuterOptimizer = outer_optimizer(spec.outer, torch.from_numpy(self.values))
        self._rounds = Rounds(spec, layout, codec, self.outer, self.values)
        self._joining: set[int] = set()

    def _leaves_before_joining(self) -> set[int]:
        first: dict[int, str] = {}
        for event in sorted(self.spec.clusters.events, key=lambda e: e.step):
            if event.kind != "late":
                first.setdefault(event.cluster, event.kind)
        return {cluster for cluster, kind in first.items() if kind == "leave"}

    def _local_fragment(self) -> LocalFragment:
        streaming, outer = self.spec.streaming, self.spec.outer
        momentum = 0.0 if outer.name == "sparseloco" else outer.momentum
        return LocalFragment(
            overlap=streaming.overlap > 0, rule=streaming.merge, alpha=streaming.alpha, lr=outer.lr, momentum=momentum
        )

    @property
    def bytes(self) -> int:
        return self._rounds.bytes

    @property
    def rounds(self) -> int:
        return self._rounds.committed

    def tick(self, at: int) -> Tick | None:
        self._leave_and_join(at)
        results = []
        for cluster in self.clusters:
            if not cluster.active or self._rounds.must_wait(cluster, at):
                continue
            cluster.credit += cluster.speed
            if cluster.credit >= 1 - 1e-9:
                cluster.credit -= 1
                results.append(cluster.step(at, self.spec, self.rounds))
        self._now = at + 1
        if 0 in self._rounds.advance(self.clusters, self._now):
            self._enter_joiners()
        if not results:
            return None
        loss = sum(float(r.loss) for r in results) / len(results)
        norm = sum(float(r.grad_norm) for r in results) / len(results)
        return Tick(loss, norm, results[0].lr, sum(r.tokens for r in results), len(results))

    def _leave_and_join(self, at: int) -> None:
        for event in self.spec.clusters.events:
            if event.step != at:
                continue
            cluster = self.clusters[event.cluster]
            if event.kind == "leave" and cluster.active:
                cluster.leave()
                self._rounds.forget(cluster)
            elif event.kind == "join" and not cluster.active:
                self._joining.add(event.cluster)
        if self._joining and not any(c.active for c in self.clusters):
            self._enter_joiners()  # nobody is left to make a round's edge

    def _enter_joiners(self) -> None:
        table = self.spec.clusters
        for number in sorted(self._joining):
            peers = [c for c in self.clusters if c.active] if table.join_state == "peer" else []
            self.clusters[number].enter(self.values, peers[0] if peers else None, self._now, table.join_warmup_steps)
        self._joining.clear()

    def finish(self) -> None:
        self._rounds.drain(self.clusters, self._now)

    def state(self) -> tuple[dict[str, Any], Tensors]:
        counters = {
            "now": self._now,
            "bytes": self._rounds.bytes,
            "joining": sorted(self._joining),
            "ledger": self._ledger.to_dict(),
            "clocks": [clock_counters(c) for c in self._rounds.clocks],
            "clusters": [c.counters() for c in self.clusters],
        }
        momentum = {"momentum": torch.from_numpy(self.outer.momentum_range(0, self.outer.numel))}
        tensors: Tensors = {"global": {"values": torch.from_numpy(self.values), **momentum}}
        tensors["rounds"] = in_flight_tensors(self._rounds.clocks)
        tensors |= {c.name: c.tensors() for c in self.clusters}
        return counters, tensors

    def load(self, counters: dict[str, Any], tensors: Tensors) -> None:
        np.copyto(self.values, tensors["global"]["values"].numpy())
        if self.outer.momentum:
            self.outer.load_state_dict({"buffers": [tensors["global"]["momentum"]]})
        self._now, self._rounds.bytes = counters["now"], counters["bytes"]
        self._joining = set(counters["joining"])
        self._ledger.load_dict(counters["ledger"])
        for clock, saved in zip(self._rounds.clocks, counters["clocks"], strict=True):
            load_clock(clock, saved, tensors["rounds"])
        for cluster, saved in zip(self.clusters, counters["clusters"], strict=True):
            cluster.load(tensors[cluster.name], saved)


class OneModel:
    """The baselines: one model copy. `single` is one cluster alone; `ddp` is data-parallel training, M clusters' batches in every
    step and one fp32 gradient all-reduce between them."""

    rounds = 0

    def __init__(
        self, spec: Spec, make_trainer: Callable[[], Trainer], layout: Layout, dataset: Dataset, kind: Baseline
    ) -> None:
        self.name, self.spec = str(kind), spec
        self._ledger = Ledger(len(dataset))
        self._trainer = make_trainer()
        self._stream = SampleStream(dataset, self._ledger, "cluster-0000", spec.run.seed)
        self._members = spec.clusters.count if kind == "ddp" else 1
        self._step_bytes = 2 * (self._members - 1) * 4 * layout.total  # ring all-reduce: 2 (m - 1) / m each, m members
        self.bytes, self._total = 0, layout.total

    @property
    def values(self) -> Floats:
        return self._trainer.read(0, self._total)

    def tick(self, at: int) -> Tick:
        size = self.spec.train.batch_size
        every = size * self._members
        batch = self._stream.batch(every, round_number=0, claim=every * self.spec.train.local_steps_at(at))
        result = self._trainer.step(batch, at, micro_batch_size=self.spec.train.micro_batch_size or size)
        self.bytes += self._step_bytes
        return Tick(float(result.loss), float(result.grad_norm), result.lr, result.tokens, self._members)

    def finish(self) -> None:
        """Nothing is in flight."""

    def state(self) -> tuple[dict[str, Any], Tensors]:
        counters = {"bytes": self.bytes, "ledger": self._ledger.to_dict()}
        values = {"values": torch.from_numpy(self.values.copy())}
        return counters, {"global": values, "cluster-0000": self._trainer.state_tensors()}

    def load(self, counters: dict[str, Any], tensors: Tensors) -> None:
        self.bytes = counters["bytes"]
        self._ledger.load_dict(counters["ledger"])
        self._trainer.load_state_tensors(tensors["cluster-0000"])
