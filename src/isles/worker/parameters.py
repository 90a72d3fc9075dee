"""The local parameters of a single process, as a session reads and writes them."""

from __future__ import annotations

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
