"""The canonical flat layout: where every trainable tensor of a model lies in one fp32 vector.

Synchronising clusters speak of ranges of this vector, never of tensors. The order is fragment by fragment, and within a fragment
as the model names its parameters, so that a fragment is one contiguous range. A tied weight has one slot: reduced twice, its two
halves would drift apart. Fragment 0 is everything outside the transformer blocks (embeddings, final norm, head); the blocks
are spread over the others, strided as Streaming DiLoCo prefers (arXiv 2501.18512) or in sequence.
"""

from __future__ import annotations

import bisect
import json
import math
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
        """The layout of a model's trainable parameters.

        Raises ModelError when there are none, fewer blocks than fragments need, or a fragment of frozen blocks only."""
        if fragments < 1:
            raise ModelError(f"streaming.fragments {fragments} is less than one; use 1 for the whole model at once")
        model = uncompiled(model)
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
            if start == offset:
                raise ModelError(
                    f"fragment {fragment} of {fragments} would hold no trainable parameters; use fewer streaming.fragments"
                )
            ranges.append((start, offset))
        return cls(tuple(slots), tuple(ranges))

    @property
    def total(self) -> int:
        """Values in the flat vector."""
        return self.fragments[-1][1]

    def intersect(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """The slots that touch [start, stop), each with the part of it, counted from the slot's own start."""
        first = max(0, bisect.bisect_right(self.slots, start, key=lambda s: s.offset) - 1)
        last = bisect.bisect_left(self.slots, stop, key=lambda s: s.offset)  # asked for every chunk, so not by a walk over all
        return [
            (s, max(start, s.offset) - s.offset, min(stop, s.offset + s.numel) - s.offset)
            for s in self.slots[first:last]
            if max(start, s.offset) < min(stop, s.offset + s.numel)
        ]

    def of_fragment(self, index: int) -> tuple[Slot, ...]:
        """The slots of one fragment, in order."""
        return tuple(s for s in self.slots if s.fragment == index)

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
            return _read(record["slots"], record["fragments"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the recorded layout is damaged ({error}); the run's folder must be made anew") from error


def _read(records: Any, fragments: Any) -> Layout:
    """A layout from its record, of which nothing is believed. Raises KeyError, TypeError or ValueError."""
    if not isinstance(records, list) or not _is_count(fragments) or not 1 <= fragments <= len(records):
        raise ValueError("it has no slots, or not as many fragments as they allow")
    slots: list[Slot] = []
    ends: list[int] = []  # of the fragments begun so far
    offset = 0
    for name, shape, fragment in records:
        if not isinstance(name, str) or not isinstance(shape, list) or not all(_is_count(n) for n in shape):
            raise ValueError(f"the slot of {name!r} has no name or no shape")
        if not _is_count(fragment) or fragment not in (len(ends) - 1, len(ends)):
            raise ValueError(f"the slot of {name!r} is out of order")
        if fragment == len(ends):
            ends.append(offset)
        slots.append(Slot(name, tuple(shape), offset, math.prod(shape), fragment))
        offset += slots[-1].numel
        ends[-1] = offset
    starts = [0, *ends[:-1]]
    if len(ends) != fragments or any(start == end for start, end in zip(starts, ends, strict=True)):
        raise ValueError("a fragment is empty")
    if len({s.name for s in slots}) != len(slots) or offset >= 2**63:
        raise ValueError("a name comes twice, or the sizes are beyond any model")
    return Layout(tuple(slots), tuple(zip(starts, ends, strict=True)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def uncompiled(model: Any) -> Any:
    """The model that torch.compile wrapped, whose names carry no prefix; any other model itself."""
    return getattr(model, "_orig_mod", model)


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The model's stack of blocks: its longest list of modules of one class that lies in no other such list.

    The lists inside a block (experts, branches) may be longer than the stack. Raises ModelError when there is none."""
    stacks = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len({type(block) for block in m}) == 1
    ]
    outer = [m for name, m in stacks if not any(name.startswith(f"{other}.") for other, _ in stacks if other != name)]
    if not outer:
        raise ModelError("the model has no stack of equal blocks to make fragments of; use streaming.fragments = 1")
    return max(outer, key=len)


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

    Raises ModelError when the tensors differ or the vector is not of the source layout."""
    if tuple(values.shape) != (source.total,):
        raise ModelError(
            f"the vector has shape {list(values.shape)}, its layout {source.total} values; it belongs to another run"
        )
    places = {s.name: s for s in source.slots}
    if {n: s.shape for n, s in places.items()} != {s.name: s.shape for s in target.slots}:
        raise ModelError("the parameters do not fit this model: names or shapes of its tensors differ")
    pieces = [values[places[s.name].offset : places[s.name].offset + s.numel] for s in target.slots]
    return torch.cat(pieces)


class FlatParameters:
    """Re-homes a model's trainable parameters as views of one contiguous fp32 vector.

    The Parameter objects stay (optimizers keep working, tied weights stay tied); only their storage moves, so that a later FlatParameters
    of the same model takes them away from this one. `values`: fp32, shape [layout.total], on the model's device. Raises ModelError when
    the model does not fit the layout, is not fp32, or lies on more than one device."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        named = {name: p for name, p in uncompiled(model).named_parameters() if p.requires_grad}
        if {n: tuple(p.shape) for n, p in named.items()} != {s.name: s.shape for s in layout.slots}:
            raise ModelError("the model does not fit the layout: names or shapes of its trainable tensors differ")
        wrong = next((n for n, p in named.items() if p.dtype != torch.float32), None)
        if wrong:
            raise ModelError(f"parameter {wrong} is {named[wrong].dtype}; master weights must be fp32")
        devices = {str(p.device) for p in named.values()}
        if len(devices) > 1:
            raise ModelError(f"the model lies on {' and '.join(sorted(devices))}; move it to one device first")
        self.layout = layout
        self.values = torch.empty(layout.total, dtype=torch.float32, device=devices.pop())
        for slot in layout.slots:
            view = self.values[slot.offset : slot.offset + slot.numel].view(slot.shape)
            view.copy_(named[slot.name].detach())
            named[slot.name].data = view

    def fragment(self, index: int) -> torch.Tensor:
        """A view of one fragment's values."""
        start, stop = self.layout.fragments[index]
        return self.values[start:stop]

    def copy_from(self, flat: torch.Tensor, start: int, stop: int) -> None:
        """Set the parameters on [start, stop) from a tensor of that many values, on any device. Raises ValueError for any other count."""
        if not 0 <= start <= stop <= self.layout.total or tuple(flat.shape) != (stop - start,):
            raise ValueError(
                f"a tensor of shape {list(flat.shape)} is not range [{start}, {stop}) of {self.layout.total} values"
            )
        self.values[start:stop].copy_(flat.detach())
