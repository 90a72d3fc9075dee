"""A cluster's own side of one fragment: what it last handed off, and how a result is merged into parameters that moved on.

Plain DiLoCo needs nothing of this: x = g after every round. With overlap a fragment leaves, training goes on, and the result
arrives tau steps later; a late cluster receives a result that it had no part in. The rule that holds throughout: **no local
progress is lost and none is counted twice.** Names: g global parameters, x local ones, *base* the point from which unsent
progress is measured (g itself where nothing is in flight), *sent* the local parameters at the moment of sending.

    send       d = base - x;  base = sent = x
    keep       x = g_new + (x - sent)                    the progress since sending stays
    mix        x = alpha x + (1 - alpha) g_new           Streaming DiLoCo (arXiv 2501.18512); next d = g_new - x
    eager      x = g_new + offset                        one whole round of delay (Eager updates, arXiv 2502.12996)
    late       x = g_new + (x - g_old)                   not in this round: all progress stays for the next

In the eager paper every cluster steps its *own* outer parameters with  mean(t-1) + share (d_m(t) - d_m(t-1)), so that no two
clusters agree. Nesterov is linear in its gradients, so that sum can be split: the common g takes mean(t-1), the same on every
cluster, and a private *offset* takes the rest with a momentum of its own. Both forms give the same x (a test holds them together);
this one keeps the global parameters bit-identical everywhere.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from isles.outer.optimizer import OuterOptimizer

Floats = NDArray[np.float32]
Rule = Literal["mix", "keep", "eager"]


class LocalFragment:
    """The state one cluster keeps of one fragment. Arrays are fp32 of the fragment's size; none is kept without overlap."""

    def __init__(
        self, *, overlap: bool, rule: Rule = "keep", alpha: float = 0.5, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.overlap, self.rule, self.alpha = overlap, rule, alpha
        self._lr, self._mu = lr, momentum
        self._base: Floats | None = None  # None: the global parameters
        self._sent: list[Floats] = []  # oldest first; two for an instant when overlap is a whole round
        self._offset: Floats | None = None
        self._offset_optimizer: OuterOptimizer | None = None
        self._own: Floats | None = None  # eager: the share of the mean that came from this cluster

    def base(self, g: Floats) -> Floats:
        """The point from which unsent progress is measured; do not write to it."""
        return g if self._base is None else self._base

    def handed_off(self, x: Floats, g: Floats, own: Floats | None = None) -> None:
        """Call after base(g) - x was encoded. own (eager only): the decoded contribution times its share of the mean; x is moved
        in place to where the next round starts."""
        if not self.overlap:
            return
        if self.rule == "eager":
            if own is None:
                raise ValueError("the eager rule needs the cluster's own decoded contribution")
            x[:] = g + self._eager_offset(own)
            self._base = x.copy()
        else:
            self._base = x.copy()
            self._sent.append(self._base)

    def merge(self, x: Floats, g_old: Floats, g_new: Floats, *, contributed: bool) -> None:
        """Merge the committed global parameters into the local ones, in place.

        contributed: whether this cluster's contribution is in the result."""
        if not contributed:
            moved = g_new - g_old
            if self._base is not None:
                self._base = self._base + moved
            self._sent = [sent + moved for sent in self._sent]
            x[:] = g_new + (x - g_old)
        elif not self.overlap:
            x[:] = g_new
        elif self.rule == "eager":
            x[:] = (g_new + self._eager_offset(None)) + (x - self.base(g_old))
            self._base = (g_new + self._eager_offset(None)).copy()
        elif self.rule == "mix":
            self._sent.pop(0)
            x[:] = np.float32(self.alpha) * x + np.float32(1 - self.alpha) * g_new
            self._base = None
        else:
            sent, unsent = self._sent.pop(0), x - self.base(g_old)
            moved = g_new - sent
            self._sent = [later + moved for later in self._sent]  # what else is in flight is measured from where x is now
            x[:] = g_new + (x - sent)
            self._base = x - unsent if self._sent else None

    def _eager_offset(self, own: Floats | None) -> Floats:
        if own is not None:
            if self._offset is None or self._offset_optimizer is None:
                self._offset = np.zeros_like(own)
                self._offset_optimizer = OuterOptimizer([torch.from_numpy(self._offset)], lr=self._lr, momentum=self._mu)
            change = own if self._own is None else own - self._own
            self._own = own.copy()
            self._offset_optimizer.step_range(0, own.size, change)
        if self._offset is None:
            raise ValueError("an eager result arrived before anything was sent")
        return self._offset

    def reset(self) -> None:
        """Forget everything in flight: the cluster starts anew from the global parameters."""
        self._base, self._sent = None, []
        self._offset = self._offset_optimizer = self._own = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of what is held, as named fp32 tensors; empty for plain DiLoCo between rounds."""
        arrays: dict[str, Floats | None] = {"base": self._base, "offset": self._offset, "own": self._own}
        arrays |= {f"sent.{i}": sent for i, sent in enumerate(self._sent)}
        if self._offset_optimizer is not None and self._offset is not None:
            arrays["offset_momentum"] = self._offset_optimizer.momentum_range(0, self._offset.size)
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if array is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        arrays = {name: tensor.numpy().copy() for name, tensor in state.items()}
        self.reset()
        self._base = arrays.get("base")
        self._sent = [arrays[f"sent.{i}"] for i in range(sum(name.startswith("sent.") for name in arrays))]
        self._own = arrays.get("own")
        if "offset" in arrays:
            self._offset = arrays["offset"]
            self._offset_optimizer = OuterOptimizer([torch.from_numpy(self._offset)], lr=self._lr, momentum=self._mu)
            if self._mu:
                self._offset_optimizer.load_state_dict({"buffers": [torch.from_numpy(arrays["offset_momentum"])]})
