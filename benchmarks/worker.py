"""Tokens per second of the worker's loop as a fraction of a bare PyTorch loop over the same model and the same batches.

    python benchmarks/worker.py [--parameters 0.8M] [--pairs 15] [--json FILE]

Both sides start from the same weights and take turns in short segments of one process, so that a machine whose speed drifts
drifts for both; the ratio is taken pair by pair. The bare loop is what a person would write: forward, cross-entropy, backward,
clip, fused AdamW, a learning rate set from the same schedule. At the end both must hold the same parameters bit for bit, or
they did not do the same work.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from isles.model import Layout, build_model
from isles.spec import Spec, spec_from
from isles.worker import Trainer, lr_factor

BAR = 0.98


class BareLoop:
    """The loop a person would write by hand."""

    def __init__(self, model: torch.nn.Module, spec: Spec) -> None:
        self.model, self.table, self.steps = model.train(), spec.optimizer, spec.run.steps
        decay = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": self.table.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.table.lr, betas=self.table.betas, eps=self.table.eps, fused=True)

    def step(self, batch: NDArray[np.int64], at: int) -> None:
        tokens = torch.from_numpy(batch)
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.table.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.table.lr * lr_factor(at, self.steps, self.table)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(parameters: str, *, pairs: int, segment: int, batch_size: int, length: int, threads: int) -> dict[str, object]:
    """Ratios worker / bare, pair by pair, over alternating segments of `segment` steps."""
    torch.set_num_threads(threads)
    spec = spec_from(
        {
            "run": {"steps": 10_000},
            "model": {"family": "gpt2", "parameters": parameters},
            "data": {"sequence_length": length},
            "train": {"batch_size": batch_size, "device": "cpu"},
        }
    )
    model = build_model(spec.model, vocab_size=257, sequence_length=length, seed=0, base=Path())
    layout = Layout.of(model)
    bare_model = copy.deepcopy(model)
    worker, bare = Trainer(model, layout, spec, torch.device("cpu")), BareLoop(bare_model, spec)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 256, (batch_size, length + 1)) for _ in range(segment)]
    seconds: dict[str, list[float]] = {"worker": [], "bare": []}
    at = {"worker": 0, "bare": 0}
    for pair in range(pairs + 1):  # the first pair warms up
        order = ("worker", "bare") if pair % 2 else ("bare", "worker")
        for side in order:
            step = worker.step if side == "worker" else bare.step
            began = time.perf_counter()
            for batch in batches:
                step(batch, at[side])
                at[side] += 1
            seconds[side].append(time.perf_counter() - began)
    theirs = {name: p.detach() for name, p in bare_model.named_parameters()}
    same = all(torch.equal(theirs[name], p.detach()) for name, p in model.named_parameters())
    ratios = [b / w for w, b in zip(seconds["worker"][1:], seconds["bare"][1:], strict=True)]
    tokens = segment * batch_size * length
    return {
        "parameters": layout.total,
        "worker_tokens_per_second": tokens / statistics.median(seconds["worker"][1:]),
        "bare_tokens_per_second": tokens / statistics.median(seconds["bare"][1:]),
        "ratio": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
        "same_parameters": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="worker loop against a bare PyTorch loop")
    parser.add_argument("--parameters", nargs="+", default=["0.13M", "0.8M", "3M"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--segment", type=int, default=10, help="steps in a segment")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table("parameters", "worker tokens/s", "bare tokens/s", "ratio min", "median", "max", f"bar {BAR}", "same bits")
    rows = []
    for size in args.parameters:
        row = measure(
            size, pairs=args.pairs, segment=args.segment, batch_size=args.batch_size, length=args.length, threads=args.threads
        )
        ratio = row["ratio"]
        assert isinstance(ratio, dict)
        rows.append(row)
        table.add_row(
            f"{row['parameters']:,}", f"{row['worker_tokens_per_second']:,.0f}", f"{row['bare_tokens_per_second']:,.0f}",
            *(f"{ratio[k]:.3f}" for k in ("min", "median", "max")), "met" if ratio["median"] >= BAR else "missed", str(row["same_parameters"]),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
