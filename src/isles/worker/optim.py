"""The inner optimizer of a worker: AdamW, or Muon for matrices with AdamW for the rest, and the learning-rate schedule.

The state stays with its cluster and is never averaged or reset at a round's edge (DiLoCo, arXiv 2311.08105). The learning
rate is a pure function of the run's step, written into the optimizer before every step: a joiner cannot run on a stale one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from isles.errors import SpecError
from isles.spec import OptimizerTable


def lr_factor(step: int, total: int, table: OptimizerTable) -> float:
    """Share of the peak learning rate at local step `step` (from 0) of `total`.

    Linear warm-up, then cosine to min_lr_ratio, flat with a linear end (wsd: warm-up, stable, decay), or constant."""
    if step < table.warmup_steps:
        return (step + 1) / table.warmup_steps
    floor = table.min_lr_ratio
    if table.schedule == "constant":
        return 1.0
    if table.schedule == "wsd":
        decay = max(1, round(total * table.decay_ratio))
        left = (total - step) / decay
        return 1.0 if left >= 1 else floor + (1 - floor) * max(0.0, left)
    done = (step - table.warmup_steps) / max(1, total - table.warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class InnerOptimizer:
    """AdamW over all trainable parameters, or Muon over the blocks' matrices and AdamW over the others.

    Weight decay acts on tensors of two and more dimensions. AdamW is torch's fused one where the device has it."""

    def __init__(self, model: nn.Module, table: OptimizerTable) -> None:
        self._table = table
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = _hidden_matrices(model) if table.name == "muon" else []
        chosen = {id(p) for p in matrices}
        decayed = [p for _, p in named if p.ndim >= 2 and id(p) not in chosen]
        plain = [p for _, p in named if p.ndim < 2]
        groups = [{"params": g, "weight_decay": d} for g, d in ((decayed, table.weight_decay), (plain, 0.0)) if g]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if groups:
            fused = all(p.device.type in ("cpu", "cuda", "mps") for _, p in named)
            self._parts.append(
                (torch.optim.AdamW(groups, lr=table.lr, betas=table.betas, eps=table.eps, fused=fused), table.lr)
            )
        if matrices:
            muon = torch.optim.Muon(matrices, lr=table.muon_lr, momentum=table.muon_momentum, weight_decay=table.weight_decay)
            self._parts.append((muon, table.muon_lr))

    def step(self, factor: float) -> None:
        """One step with every peak learning rate multiplied by `factor`."""
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer, _ in self._parts:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The moments and step counts as named tensors: `"<optimizer>.<parameter>.<moment>"`."""
        return {
            f"{i}.{index}.{key}": value
            for i, (optimizer, _) in enumerate(self._parts)
            for index, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over `state_tensors` of an optimizer over the same parameters. The learning rate is not part of it."""
        for i, (optimizer, _) in enumerate(self._parts):
            state: dict[int, dict[str, Any]] = {}
            for name, value in tensors.items():
                part, index, key = name.split(".", 2)
                if int(part) == i:
                    state.setdefault(int(index), {})[key] = value.clone()
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _hidden_matrices(model: nn.Module) -> Sequence[nn.Parameter]:
    """What Muon is for: 2-D weights inside the blocks, not embeddings or the head."""
    outside = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside |= {id(p) for p in head.parameters()} if head is not None else set()
    chosen = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outside]
    if not chosen:
        raise SpecError("optimizer.name 'muon' needs 2-D weights inside the blocks, and this model has none; use 'adamw'")
    return chosen
