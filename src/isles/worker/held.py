"""Which part of the canonical flat layout a process holds: all of a plain tensor, its rows of one that FSDP2 has split."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from isles.errors import ModelError
from isles.model import Layout
from isles.worker.parameters import Shard


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of a tensor that a rank holds: equal shares, of which the last may be smaller or empty."""
    share = -(-rows // size)
    return min(rank * share, rows), min((rank + 1) * share, rows)


def held_shards(model: nn.Module, layout: Layout) -> list[Shard]:
    """What this process holds of a model's trainable parameters, by rising place in the flat layout; views, while the storage stays.

    Of what several processes hold, the first writes. Raises ModelError when a tensor is split by anything but rows, or is not contiguous."""
    named, shards = dict(model.named_parameters()), []
    for slot in layout.slots:
        tensor = named[slot.name]
        local, first, stop, written = tensor.detach(), 0, slot.shape[0] if slot.shape else 1, True
        if dist.is_available() and dist.is_initialized():
            local, (rank, size), written = _share(slot.name, tensor)
            first, stop = rows_of(stop, rank, size)
        shape = (stop - first, *slot.shape[1:]) if slot.shape else ()
        if tuple(local.shape) != shape:
            raise ModelError(
                f"this process holds {list(local.shape)} of {slot.name} instead of rows {first} to {stop}; "
                "this torch splits tensors in another way, use one that isles names"
            )
        if not local.is_contiguous():
            raise ModelError(f"parameter {slot.name} is not contiguous in memory; give it contiguous values first")
        row = slot.numel // slot.shape[0] if slot.shape and slot.shape[0] else 0
        shards.append(Shard(slot.offset + first * row, local.view(-1), written))
    return shards


def _share(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int], bool]:
    """What this process holds of a tensor; its number among those that the rows are split over, and how many they are; and whether it is the
    first of those that hold the same. Raises ModelError."""
    from torch.distributed.tensor import DTensor  # a second to import, which one process can do without
    from torch.distributed.tensor import Shard as Rows

    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0, 1), dist.get_rank() == 0
    mesh, written = tensor.device_mesh, True
    split: list[tuple[int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        here, size = mesh.get_local_rank(axis), mesh.size(axis)
        if isinstance(placement, Rows) and placement.dim == 0:
            split.append((here, size))
        elif placement.is_replicate():
            written = written and here == 0
        else:
            raise ModelError(
                f"parameter {name} is placed {placement}; isles takes tensors that are split by rows, as FSDP2 does"
            )
    if len(split) > 1:
        raise ModelError(f"the rows of parameter {name} are split along {len(split)} axes of the mesh; split them along one")
    return tensor.to_local().detach(), (split[0] if split else (0, 1)), written
