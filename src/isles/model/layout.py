"""The canonical flat layout: where every trainable tensor of a model lies in one fp32 vector.

Synchronising clusters speak of ranges of this vector, never of tensors. The order is fragment by fragment, and within a fragment
as the model names its parameters, so that a fragment is one contiguous range. A tied weight has one slot: reduced twice, its two
halves would drift apart. Fragment 0 is everything outside the transformer blocks (embeddings, final norm, head); the blocks
are spread over the others, strided as Streaming DiLoCo prefers (arXiv 2501.18512) or in sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import nn

from isles.errors import ModelError

Order = Literal["strided", "sequential"]


@dataclass(frozen=True)
class Slot:
    """One tensor's place: values [offset, offset + numel) of the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    fragment: int


@dataclass(frozen=True)
class Layout:
    """All slots, by rising offset without gaps, and the range of every fragment."""

    slots: tuple[Slot, ...]
    fragments: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: nn.Module, fragments: int = 1, order: Order = "strided") -> Layout:
        """The layout of a model's trainable parameters. Raises ModelError when there are none, or fewer blocks than fragments need."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # tied weights come once
        if not named:
            raise ModelError("the model has no trainable parameters; unfreeze some")
        member = _fragment_of(model, fragments, order) if fragments > 1 else {}
        slots: list[Slot] = []
        ranges: list[tuple[int, int]] = []
        offset = 0
        for fragment in range(fragments):
            start = offset
            for name, p in named:
                if member.get(id(p), 0) == fragment:
                    slots.append(Slot(name, tuple(p.shape), offset, p.numel(), fragment))
                    offset += p.numel()
            ranges.append((start, offset))
        return cls(tuple(slots), tuple(ranges))

    @property
    def total(self) -> int:
        """Values in the flat vector."""
        return self.fragments[-1][1]

    def intersect(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """The slots that touch [start, stop), each with the part of it, counted from the slot's own start."""
        return [
            (s, max(start, s.offset) - s.offset, min(stop, s.offset + s.numel) - s.offset)
            for s in self.slots
            if max(start, s.offset) < min(stop, s.offset + s.numel)
        ]

    def name_at(self, position: int) -> str:
        """Name of the tensor that holds a position of the flat vector."""
        found = self.intersect(position, position + 1)
        if not found:
            raise IndexError(f"position {position} lies outside the layout of {self.total} values")
        return found[0][0].name

    def digest(self) -> str:
        """blake3 of names, shapes, offsets and fragments: clusters that share it mean the same by a range."""
        return blake3(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {"slots": [[s.name, list(s.shape), s.fragment] for s in self.slots], "fragments": len(self.fragments)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Layout:
        """Undo `to_dict`; offsets follow from the shapes. Raises ModelError when the record is damaged."""
        try:
            slots, offset = [], 0
            ends = [0] * (int(record["fragments"]) + 1)
            for name, shape, fragment in record["slots"]:
                numel = 1
                for size in shape:
                    numel *= int(size)
                slots.append(Slot(str(name), tuple(int(n) for n in shape), offset, numel, int(fragment)))
                offset += numel
                ends[int(fragment) + 1] = offset
            for i in range(1, len(ends)):
                ends[i] = max(ends[i], ends[i - 1])
            ordered = [s.fragment for s in slots]
            if not slots or ordered != sorted(ordered) or min(ordered) < 0 or any(n < 0 for s in slots for n in s.shape):
                raise ValueError("fragments or shapes are out of order")
            return cls(tuple(slots), tuple((ends[i], ends[i + 1]) for i in range(len(ends) - 1)))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ModelError(f"the recorded layout is damaged ({error}); the run's folder must be made anew") from error


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The model's stack of blocks: its longest list of modules of one class. Raises ModelError when it has none."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(b) for b in m}) == 1]
    if not stacks:
        raise ModelError("the model has no stack of equal blocks to make fragments of; use streaming.fragments = 1")
    return max(stacks, key=len)


def _fragment_of(model: nn.Module, fragments: int, order: Order) -> dict[int, int]:
    """id of a parameter inside a block -> its fragment; all others belong to fragment 0."""
    blocks = transformer_blocks(model)
    spread = fragments - 1
    if spread > len(blocks):
        raise ModelError(
            f"streaming.fragments {fragments} needs at least {spread} transformer blocks, the model has {len(blocks)}"
        )
    member: dict[int, int] = {}
    for i, block in enumerate(blocks):
        fragment = 1 + (i % spread if order == "strided" else i * spread // len(blocks))
        member |= {id(p): fragment for p in block.parameters()}
    return member


def remap(values: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """A flat vector of one layout in the order of another over the same tensors (other fragments). fp32, shape [total].

    Raises ModelError when the tensors differ."""
    places = {s.name: s for s in source.slots}
    if {n: s.shape for n, s in places.items()} != {s.name: s.shape for s in target.slots}:
        raise ModelError("the parameters do not fit this model: names or shapes of its tensors differ")
    pieces = [values[places[s.name].offset : places[s.name].offset + s.numel] for s in target.slots]
    return torch.cat(pieces)


class FlatParameters:
    """Re-homes a model's trainable parameters as views of one contiguous fp32 vector.

    The Parameter objects stay (optimizers keep working, tied weights stay tied); only their storage moves. `values`: fp32, shape
    [layout.total], on the model's device. Raises ModelError when the model does not fit the layout or is not fp32."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if {n: tuple(p.shape) for n, p in named.items()} != {s.name: s.shape for s in layout.slots}:
            raise ModelError("the model does not fit the layout: names or shapes of its trainable tensors differ")
        wrong = next((n for n, p in named.items() if p.dtype != torch.float32), None)
        if wrong:
            raise ModelError(f"parameter {wrong} is {named[wrong].dtype}; master weights must be fp32")
        self.layout = layout
        self.values = torch.empty(layout.total, dtype=torch.float32, device=next(iter(named.values())).device)
        for slot in layout.slots:
            view = self.values[slot.offset : slot.offset + slot.numel].view(slot.shape)
            view.copy_(named[slot.name].detach())
            named[slot.name].data = view

    def fragment(self, index: int) -> torch.Tensor:
        """A view of one fragment's values."""
        start, stop = self.layout.fragments[index]
        return self.values[start:stop]

    def copy_from(self, flat: torch.Tensor, start: int, stop: int) -> None:
        """Set the parameters on [start, stop) from a tensor of that many values, on any device."""
        self.values[start:stop].copy_(flat)
