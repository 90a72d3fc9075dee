"""A training script's process as one of a cluster's workers: its model, as a session and a crew reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isles.errors import ModelError
from isles.model import Layout
from isles.model.layout import Order, uncompiled
from isles.worker.held import held_shards
from isles.worker.memory import SharedParameters
from isles.worker.parameters import ShardParameters
from isles.worker.ranks import Ranks

Floats = NDArray[np.float32]


class ScriptRank:
    """One process of a script, alone or of several that torch.distributed has brought together.

    model: any module; wrapped in DDP, compiled, or split by FSDP2. Its trainable parameters must be fp32. Raises ModelError."""

    def __init__(self, model: nn.Module) -> None:
        self.model = bare(model)
        wrong = next(
            (f"{n} is {p.dtype}" for n, p in self.model.named_parameters() if p.requires_grad and p.dtype != torch.float32),
            None,
        )
        if wrong:
            raise ModelError(
                f"parameter {wrong}, and master weights must be fp32, or small steps are rounded away; "
                "keep the model in fp32 and compute in bf16 by torch.autocast"
            )
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.ranks = Ranks.beside() if several else None
        self.size = self.ranks.size if self.ranks is not None else 1
        self._folder: Path | None = None
        self._shared: SharedParameters | None = None

    @property
    def leads(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0

    def layout_of(self, fragments: int, order: Order) -> Layout:
        """Raises ModelError when the model cannot be laid out so."""
        return Layout.of(self.model, fragments, order)

    def open(self, folder: str, fragments: int, order: str) -> None:
        """From now on ranges are of this layout, and the mapped file is the one in this folder. Raises ModelError."""
        self._folder, self._shared = Path(folder), None
        self.layout = self.layout_of(fragments, cast(Order, order))
        held_shards(self.model, self.layout)
        self.parameters = ShardParameters(lambda: held_shards(self.model, self.layout))

    def change(self, how: str, which: str, start: int, stop: int, *more: float) -> None:
        """Do what `session.Parameters` names `how` with a vector of the mapped file: globals or sent."""
        if self._shared is None:
            assert self._folder is not None
            self._shared = SharedParameters(self._folder / "parameters.f32", self.layout.total)
        _reshard(self.model)
        with torch.no_grad():
            getattr(self.parameters, how)(getattr(self._shared, which), start, stop, *more)

    def sum_up(self, loss: float, tokens: int, grad_norm: float) -> tuple[float, int, float]:
        """Of all processes: mean loss, tokens together, largest norm."""
        if self.ranks is None:
            return loss, tokens, grad_norm
        rows: list[Any] = self.ranks.gather([loss, tokens, grad_norm])
        losses, counts, norms = zip(*rows, strict=True)
        return sum(losses) / len(rows), sum(counts), max(norms)


def _reshard(model: nn.Module) -> None:
    """Have FSDP2 drop what it has gathered, as after a forward pass without a backward one: values written there would be lost."""
    if not dist.is_available() or not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule  # a second to import, which one process can do without

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def bare(model: nn.Module) -> nn.Module:
    """The model without what wraps it: its parameters' names are the same on every cluster."""
    while True:
        inner: nn.Module = uncompiled(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        if inner is model:
            return model
        model = inner
