"""The outer optimizer: moves the global parameters by the averaged pseudo-gradient.

    b = mu b + d
    g = g - lr (d + mu b)

Nesterov momentum as torch.optim.SGD(nesterov=True) has it (DiLoCo, arXiv 2311.08105): d is *old minus new*, a descent
direction, so the step subtracts it, and mu is applied twice: with lr 0.7 and mu 0.9 the first step is 1.33 d and the steady
gain 7 d. With lr 1 and mu 0 it is parameter averaging; with mu 0 it is the outer step of SparseLoCo (arXiv 2508.15706).

The arithmetic is a numba loop rather than torch operators because every cluster must compute the same bits: torch fuses
multiply and add on some processors and in the vectorised part of a tensor only; here each product and each sum is rounded
once, in order, on every IEEE machine. It also needs no temporary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isles.jit import kernel
from isles.spec import OuterTable

Floats = NDArray[np.float32]


@kernel
def _nesterov(values: Floats, buffer: Floats, gradient: Floats, lr: np.float32, momentum: np.float32) -> None:
    for i in range(values.size):
        b = momentum * buffer[i] + gradient[i]
        buffer[i] = b
        values[i] -= lr * (gradient[i] + momentum * b)


@kernel
def _descent(values: Floats, gradient: Floats, lr: np.float32) -> None:
    for i in range(values.size):
        values[i] -= lr * gradient[i]


class OuterOptimizer:
    """The outer step over a list of tensors, updated in place.

    Args:
        params: fp32, contiguous CPU tensors of any shape. Together, in order, they form one flat vector; `step_range` speaks of
            positions in it. A single flat tensor is the usual case.
        lr: outer learning rate (eta).
        momentum: Nesterov momentum (mu); 0 keeps no state.

    Raises:
        ValueError: a tensor is not fp32, not on the CPU or not contiguous.
    """

    def __init__(self, params: Sequence[torch.Tensor], *, lr: float = 0.7, momentum: float = 0.9) -> None:
        if not lr > 0 or not 0 <= momentum < 1:
            raise ValueError(f"outer lr must be positive and momentum in [0, 1), not {lr} and {momentum}")
        self.lr, self.momentum = lr, momentum
        self._values = [_flat(p, f"parameter {i}") for i, p in enumerate(params)]
        self._momentum = [np.zeros_like(v) for v in self._values] if momentum else []
        self._starts = np.cumsum([0] + [v.size for v in self._values]).tolist()

    def move_to(self, params: Sequence[torch.Tensor]) -> None:
        """Work on these tensors from now on, of the same sizes and values; the momentum stays. Raises ValueError."""
        values = [_flat(p, f"parameter {i}") for i, p in enumerate(params)]
        if [v.size for v in values] != [v.size for v in self._values]:
            raise ValueError(f"parameters of sizes {[v.size for v in values]} in place of {[v.size for v in self._values]}")
        self._values = values

    @property
    def numel(self) -> int:
        """Values in all tensors together."""
        return int(self._starts[-1])

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One outer step. gradients: one pseudo-gradient (old minus new) a tensor, same shapes; None leaves that tensor and
        its momentum as they are."""
        if len(gradients) != len(self._values):
            raise ValueError(f"{len(gradients)} gradients for {len(self._values)} parameters")
        flat = [None if g is None else _flat(g, f"gradient {i}") for i, g in enumerate(gradients)]
        for i, gradient in enumerate(flat):
            if gradient is not None and gradient.size != self._values[i].size:
                raise ValueError(f"gradient {i} has {gradient.size} values, its parameter {self._values[i].size}")
        for i, gradient in enumerate(flat):
            if gradient is not None:
                self._apply(i, slice(0, gradient.size), gradient)

    def step_range(self, start: int, stop: int, gradient: Floats) -> None:
        """One outer step on positions [start, stop) of the flat vector only: a fragment, a part or a chunk of it.

        gradient: fp32, shape [stop - start]. Positions outside keep their value and their momentum."""
        if not 0 <= start <= stop <= self.numel or gradient.shape != (stop - start,) or gradient.dtype != np.float32:
            raise ValueError(
                f"range [{start}, {stop}) of {self.numel} values does not fit a gradient {gradient.dtype}{gradient.shape}"
            )
        for i, first in enumerate(self._starts[:-1]):
            low, high = max(start, first), min(stop, self._starts[i + 1])
            if low < high:
                self._apply(i, slice(low - first, high - first), gradient[low - start : high - start])

    def _apply(self, index: int, where: slice, gradient: Floats) -> None:
        lr, values = np.float32(self.lr), self._values[index][where]
        if self.momentum:
            _nesterov(values, self._momentum[index][where], gradient, lr, np.float32(self.momentum))
        else:
            _descent(values, gradient, lr)

    def momentum_range(self, start: int, stop: int) -> Floats:
        """A copy of the momentum on [start, stop) of the flat vector (zeros when there is none), fp32."""
        if not self._momentum:
            return np.zeros(stop - start, np.float32)
        flat = self._momentum[0] if len(self._momentum) == 1 else np.concatenate(self._momentum)
        return flat[start:stop].copy()

    def state_dict(self) -> dict[str, Any]:
        """`{"lr", "momentum", "buffers"}`; the buffers are flat fp32 tensors that share memory with the optimizer."""
        return {"lr": self.lr, "momentum": self.momentum, "buffers": [torch.from_numpy(m) for m in self._momentum]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the momentum of `state_dict`. The optimizer keeps its own lr and mu: a spec may change them between runs."""
        buffers = [_flat(b, f"momentum {i}") for i, b in enumerate(state["buffers"])]
        if [b.size for b in buffers] != [m.size for m in self._momentum]:
            raise ValueError(
                f"momentum of sizes {[b.size for b in buffers]} does not fit parameters of {[m.size for m in self._momentum]}"
            )
        for mine, theirs in zip(self._momentum, buffers, strict=True):
            np.copyto(mine, theirs)


def outer_optimizer(table: OuterTable, values: torch.Tensor) -> OuterOptimizer:
    """The outer optimizer that a spec asks for, over one flat fp32 vector."""
    momentum = 0.0 if table.name == "sparseloco" else table.momentum
    return OuterOptimizer([values], lr=table.lr, momentum=momentum)


def _flat(tensor: torch.Tensor, what: str) -> Floats:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{what} must be a contiguous fp32 tensor on the CPU, not {tensor.dtype} on {tensor.device}")
    return tensor.detach().view(-1).numpy()
