"""What the ranks of a test group do: they train a share of a model, and say what they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from isles.errors import IslesError
from isles.model import Layout, build_model
from isles.spec import Spec, spec_from
from isles.worker import StepResult, Trainer
from isles.worker.parallel import ShardedTrainer
from isles.worker.parameters import ShardParameters
from isles.worker.rank import ClusterRecord, Rank
from isles.worker.ranks import Ranks

STEPS = 4


class Output(NamedTuple):
    logits: torch.Tensor


class Odd(nn.Module):
    """A model whose tensors have 257, 5, 3 and 1 rows, which two ranks cannot hold evenly; the head is tied to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 3), nn.GELU(), nn.Linear(3, 5)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.head = nn.Linear(5, 257, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Output:  # noqa: ARG002
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return Output(self.head(x * self.scale))


def spec_of(*overrides: str) -> Spec:
    tables: dict[str, Any] = {
        "run": {"steps": 20},
        "model": {"family": "llama", "layers": 2, "hidden_size": 16, "heads": 2},
        "data": {"sequence_length": 16},
        "train": {"batch_size": 4, "threads": 1},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    }
    return spec_from(tables, overrides)


def make(kind: str, spec: Spec) -> nn.Module:
    torch.manual_seed(0)
    if kind == "odd":
        return Odd()
    model: nn.Module = build_model(spec.model, vocab_size=257, sequence_length=16, seed=0, base=Path())
    return model


def batch(at: int) -> np.ndarray:
    return np.random.default_rng(at).integers(0, 257, (4, 17))


def one_rank(kind: str, *overrides: str) -> Trainer:
    spec = spec_of(*overrides)
    model = make(kind, spec)
    return Trainer(model, Layout.of(model, 3), spec, torch.device("cpu"))


def sharded(ranks: Ranks, kind: str, *overrides: str) -> ShardedTrainer:
    spec = spec_of(*overrides)
    model = make(kind, spec)
    return ShardedTrainer(model, Layout.of(model, 3), spec, ranks)


def step(ranks: Ranks, trainer: ShardedTrainer, at: int) -> StepResult:
    """Over as much of the batch as the ranks can share evenly."""
    share = 4 // ranks.size
    return trainer.step(batch(at)[ranks.rank * share : (ranks.rank + 1) * share], at)


def plain(result: StepResult) -> tuple[float, float, int, float]:
    return float(result.loss), float(result.grad_norm), result.tokens, result.lr


def held(trainer: ShardedTrainer) -> np.ndarray:
    """The values that a rank holds, NaN elsewhere."""
    vector = np.full(trainer.layout.total, np.nan, np.float32)
    ShardParameters(trainer.shards).write_out(vector, 0, trainer.layout.total)
    return vector


def train(ranks: Ranks, kind: str, *overrides: str) -> tuple[list[tuple[float, float, int, float]], np.ndarray]:
    trainer = sharded(ranks, kind, *overrides)
    trainer.rewarm(1, 3)
    results = [plain(step(ranks, trainer, at)) for at in range(STEPS)]
    return results, held(trainer)


def change(
    ranks: Ranks, kind: str, ranges: Sequence[tuple[int, int]], other: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Every operation on every range: what was written out, and what is held in the end. A step before, so that nothing is in its first state."""
    trainer = sharded(ranks, kind)
    step(ranks, trainer, 0)
    parameters, out = ShardParameters(trainer.shards), []
    for start, stop in ranges:
        vector = np.full(trainer.layout.total, np.nan, np.float32)
        parameters.write_out(vector, start, stop)
        out.append(vector)
        parameters.subtract(other, start, stop)
        parameters.add(other * 3, start, stop)
        parameters.mix(other, start, stop, 0.25)
    first, last = ranges[0]
    parameters.read_in(other, first, last)
    return out, held(trainer)


def tied(ranks: Ranks, kind: str, *overrides: str) -> tuple[bool, int]:
    """Whether the head is the embeddings after a step, and how many tensors there are."""
    trainer = sharded(ranks, kind, *overrides)
    step(ranks, trainer, 0)
    model: Any = trainer.model
    embed, head = (model.embed, model.head) if kind == "odd" else (model.get_input_embeddings(), model.get_output_embeddings())
    return embed.weight is head.weight, len(trainer.shards())


def goes_on(ranks: Ranks, kind: str) -> bool:
    """Whether a trainer with another's state goes on with its bits."""
    a, b = sharded(ranks, kind), sharded(ranks, kind)
    for at in range(2):
        step(ranks, a, at)
    a.rewarm(2, 4)
    b.load_state_tensors({name: tensor.clone() for name, tensor in a.state_tensors().items()})
    same = [plain(step(ranks, a, at)) == plain(step(ranks, b, at)) for at in range(2, 5)]
    return all(same) and np.array_equal(held(a), held(b), equal_nan=True)


def mistake(ranks: Ranks, kind: str, *overrides: str) -> str:
    """The sentence that a model or spec is refused with."""
    spec = spec_of(*overrides)
    model = make("llama", spec)
    if kind == "scalar":
        model.temperature = nn.Parameter(torch.tensor(1.0))
    try:
        ShardedTrainer(model, Layout.of(model), spec, ranks)
    except IslesError as error:
        return str(error)
    return ""


def cluster_folder(folder: Path, data: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    spec = spec_of(f"data.path={data}")
    (folder / "cluster.json").write_text(json.dumps({"spec": spec.model_dump(mode="json", exclude_none=True), "base": "/"}))
    return folder


def saves(ranks: Ranks, folder: Path, steps: Sequence[int]) -> list[tuple[int, ...] | None]:
    """The rounds that a rank finds saved: at first, and after each rank has saved the state of its own of the `steps`."""
    record, found = ClusterRecord(folder), []
    rank = Rank(folder, record, ranks)
    found.append(rank.saved.rounds())
    rank.load_inner()
    result = rank.step([(0, 3), (10, 11)], 0)
    assert result.tokens == 4 * 16
    rank.save({"step": steps[ranks.rank], "fragments": [[1, 0, 0, [], 7]]})
    found.append(Rank(folder, record, ranks).saved.rounds())
    return found


def hears(ranks: Ranks) -> Any:
    return ranks.hear()


def tells(ranks: Ranks, value: Any) -> None:
    ranks.tell(value)


def gathers(ranks: Ranks) -> list[Any]:
    return ranks.gather({"rank": ranks.rank, "long": "x" * ranks.rank * 100})
