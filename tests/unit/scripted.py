"""What the ranks of a test group do as processes of a training script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.unit.sharded import Odd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from isles.worker.memory import SharedParameters
from isles.worker.ranks import Ranks
from isles.worker.script import ScriptRank


def make(kind: str) -> nn.Module:
    """replicas: DDP; rows: FSDP2; copies: FSDP2 over two copies of one share each; mixed: some blocks are split, the rest is whole."""
    torch.manual_seed(0)
    model: Any = Odd()
    if kind == "replicas":
        return nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    if kind == "rows":
        fully_shard(model)
    elif kind == "copies":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "rows")))
    else:
        for block in model.blocks:
            fully_shard(block)
    return model


def there_and_back(ranks: Ranks, kind: str, folder: str) -> tuple[str, tuple[float, int, float]]:
    """globals = x; x += globals; sent = x, each after a forward pass that gathers. Returns the layout's digest, and what sums come to."""
    model = make(kind)
    member = ScriptRank(model)
    member.open(folder, 3, "strided")
    total = member.layout.total
    if member.leads:
        SharedParameters(Path(folder) / "parameters.f32", total, create=True)
    ranks.together()
    for how, which in (("write_out", "globals"), ("add", "globals"), ("write_out", "sent")):
        with torch.no_grad():
            model(torch.zeros((1, 4), dtype=torch.int64))
        member.change(how, which, 0, total)
        ranks.together()
    sums = member.sum_up(float(ranks.rank), 3 + ranks.rank, float(ranks.rank))
    assert member.ranks is not None
    member.ranks.leave()
    return member.layout.digest(), sums


def columns(_: Ranks) -> str:
    """The sentence that a tensor split by columns is refused with."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(1)]))
    member = ScriptRank(model)
    try:
        member.open(".", 1, "strided")
    except Exception as error:
        return str(error)
    finally:
        assert member.ranks is not None
        member.ranks.leave()
    return ""
