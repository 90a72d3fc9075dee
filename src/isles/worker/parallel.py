"""Training one model copy with several ranks, by FSDP2 (arXiv 2304.11277): every rank holds a share of the rows of every tensor.

A block's tensors are gathered when it runs and dropped again; gradients come back as each rank's share of the mean over the ranks. The fp32
master weights are the shares themselves, so the optimizer and everything that clusters synchronise touch one rank's rows only. In the canonical
flat layout a rank's share of a tensor is one range: rows come after each other there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from isles.errors import ModelError, SpecError
from isles.model import Layout
from isles.model.layout import transformer_blocks
from isles.spec import OptimizerTable, Spec
from isles.worker.held import held_shards
from isles.worker.loop import Loop, StepResult
from isles.worker.optim import InnerOptimizer
from isles.worker.parameters import Shard
from isles.worker.ranks import Ranks


class ShardedTrainer(Loop):
    """One rank's share of a model copy with its inner optimizer. As `Trainer`, and every rank must call `step`.

    Raises SpecError: the spec asks for what several ranks cannot do. Raises ModelError: the model cannot be split."""

    def __init__(self, model: nn.Module, layout: Layout, spec: Spec, ranks: Ranks) -> None:
        check_splits(spec, ranks.size)
        self._ranks = ranks
        super().__init__(model, layout, spec, ranks.device)

    def step(self, batch: NDArray[np.int64] | torch.Tensor, at: int, *, micro_batch_size: int | None = None) -> StepResult:
        """One local step.

        batch: this rank's sequences of the cluster's batch, as many on every rank; micro_batch_size: sequences per rank and forward pass.
        Loss, norm and tokens of the result are the cluster's."""
        result = super().step(batch, at, micro_batch_size=micro_batch_size)
        loss = result.loss.clone()
        dist.all_reduce(loss)
        return replace(result, loss=loss / self._ranks.size, tokens=result.tokens * self._ranks.size)

    def shards(self) -> list[Shard]:
        """What this rank holds, by rising place in the flat layout."""
        return held_shards(self._bare, self.layout)

    def _place(self, model: nn.Module) -> None:
        policy = MixedPrecisionPolicy()
        if self._train.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, self._ranks, policy)

    def _make_optimizer(self) -> InnerOptimizer:
        return ShardOptimizer(self._parameters, self._optimizer_table)

    def _cast(self, bf16: bool) -> AbstractContextManager[object]:  # noqa: ARG002 - the policy does that
        return contextlib.nullcontext()

    def _clip(self, limit: float) -> torch.Tensor:
        gradients = [_local(p.grad) for p in self._parameters if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).to(self.device) ** 2
        dist.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def _values(self) -> torch.Tensor:
        return torch.cat([shard_.values.cpu() for shard_ in self.shards()])

    def _set_values(self, values: torch.Tensor) -> None:
        place = 0
        for shard_ in self.shards():
            shard_.values.copy_(values[place : place + shard_.values.numel()])
            place += shard_.values.numel()


class ShardOptimizer(InnerOptimizer):
    """The inner optimizer over one rank's rows, as plain tensors. AdamW acts on every value by itself, so the shares add up to the whole."""

    def __init__(self, parameters: list[nn.Parameter], table: OptimizerTable) -> None:
        self._shared = parameters
        self._locals = [nn.Parameter(_local(p)) for p in parameters]
        super().__init__(nn.ParameterList(self._locals), table)

    def step(self, factor: float) -> None:
        for shared, local in zip(self._shared, self._locals, strict=True):
            local.data = _local(shared)
            local.grad = None if shared.grad is None else _local(shared.grad)
        super().step(factor)

    def zero_grad(self) -> None:
        super().zero_grad()
        for shared in self._shared:
            shared.grad = None


def check_splits(spec: Spec, size: int) -> None:
    """Raises SpecError when a run cannot be trained with so many ranks."""
    if spec.train.batch_size % size:
        raise SpecError(
            f"train.batch_size {spec.train.batch_size} cannot be split evenly over {size} ranks; use a multiple of {size}, or other ranks"
        )
    if spec.optimizer.name == "muon":
        raise SpecError(
            f"optimizer.name 'muon' needs whole matrices and {size} ranks hold rows of them; use one rank, or 'adamw' for the run"
        )


def shard(model: nn.Module, ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Split a model in place: every transformer block by itself, then what is around them. Tied weights stay tied.

    Raises ModelError for a tensor without rows."""
    scalar = next((name for name, p in model.named_parameters() if p.ndim == 0), None)
    if scalar is not None:
        raise ModelError(f"parameter {scalar} is a single number, which {ranks.size} ranks cannot split; use one rank")
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    parts = [*_own_blocks(model), model]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        if ranks.device.type == "cpu":
            assert isinstance(part, FSDPModule)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks, when each has its tensors for itself; blocks that share some are gathered with the rest of the model."""
    try:
        blocks = list(transformer_blocks(model))
    except ModelError:
        return []
    inside = [{id(p) for p in block.parameters()} for block in blocks]
    around = {id(p) for p in _parameters_around(model, blocks)}
    distinct = len(set().union(*inside)) == sum(map(len, inside)) and not around & set().union(*inside)
    return blocks if distinct else []


def _parameters_around(model: nn.Module, blocks: list[nn.Module]) -> Iterator[nn.Parameter]:
    within = {id(m) for block in blocks for m in block.modules()}
    for module in model.modules():
        if id(module) not in within:
            yield from module.parameters(recurse=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor that is split: a view."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
