"""The local parameters of a process, as a session reads and writes them: one flat tensor, or pieces of the flat layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class FlatView:
    """Over one flat fp32 tensor of the whole layout, on any device (`model.FlatParameters.values`)."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def write_out(self, vector: Floats, start: int, stop: int) -> None:
        torch.from_numpy(vector[start:stop]).copy_(self._values[start:stop].detach())

    def read_in(self, vector: Floats, start: int, stop: int) -> None:
        self._values[start:stop].detach().copy_(self._there(vector, start, stop))

    def subtract(self, vector: Floats, start: int, stop: int) -> None:
        self._values[start:stop].detach().sub_(self._there(vector, start, stop))

    def add(self, vector: Floats, start: int, stop: int) -> None:
        self._values[start:stop].detach().add_(self._there(vector, start, stop))

    def mix(self, vector: Floats, start: int, stop: int, alpha: float) -> None:
        there = self._there(vector, start, stop) * np.float32(1 - alpha).item()
        self._values[start:stop].detach().mul_(np.float32(alpha).item()).add_(there)

    def _there(self, vector: Floats, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(vector[start:stop]).to(self._values.device)


@dataclass(frozen=True)
class Shard:
    """A part of one tensor that this process holds: values [start, start + numel) of the flat layout, fp32, shape [numel]; a view.

    written: whether it is this process that writes them out, and no other that holds the same."""

    start: int
    values: torch.Tensor
    written: bool = True

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


class ShardParameters:
    """Over what a process holds, by shards. Of a vector of the whole layout it touches these only.

    shards: what it holds now, by rising place (`held_shards`)."""

    def __init__(self, shards: Callable[[], list[Shard]]) -> None:
        self._shards = shards

    def write_out(self, vector: Floats, start: int, stop: int) -> None:
        for view, there, first, last in self._parts(vector, start, stop, written=True):
            view.write_out(there, first, last)

    def read_in(self, vector: Floats, start: int, stop: int) -> None:
        for view, there, first, last in self._parts(vector, start, stop):
            view.read_in(there, first, last)

    def subtract(self, vector: Floats, start: int, stop: int) -> None:
        for view, there, first, last in self._parts(vector, start, stop):
            view.subtract(there, first, last)

    def add(self, vector: Floats, start: int, stop: int) -> None:
        for view, there, first, last in self._parts(vector, start, stop):
            view.add(there, first, last)

    def mix(self, vector: Floats, start: int, stop: int, alpha: float) -> None:
        for view, there, first, last in self._parts(vector, start, stop):
            view.mix(there, first, last, alpha)

    def _parts(
        self, vector: Floats, start: int, stop: int, *, written: bool = False
    ) -> Iterator[tuple[FlatView, Floats, int, int]]:
        """The shards that touch [start, stop): each as a view, the part of the vector that it is, and what of it is meant."""
        for shard_ in self._shards():
            first, last = max(start, shard_.start), min(stop, shard_.stop)
            if first < last and (shard_.written or not written):
                there = vector[shard_.start : shard_.stop]
                yield FlatView(shard_.values), there, first - shard_.start, last - shard_.start
