"""The worker's training loop: one local step at a time over one model copy. It knows nothing of the internet.

A worker takes a batch, does one step, and lets its parameters be read and written as ranges of the canonical flat layout.
That is the whole seam to what synchronises clusters: an agent, the simulator, or nobody. Parameters are fp32 (the master
weights); with precision bf16 the matrix products run in bf16 under autocast, so no small step is ever rounded away.
"""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from isles.errors import SpecError
from isles.model import FlatParameters, Layout, prepare_for_training
from isles.spec import Spec
from isles.worker.optim import InnerOptimizer, lr_factor

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class StepResult:
    """One local step. loss and grad_norm stay tensors on the device, so that reading them is the caller's choice of when to wait."""

    loss: torch.Tensor  # mean nats per token, scalar
    grad_norm: torch.Tensor  # before clipping, scalar
    tokens: int
    lr: float


def choose_device(name: str) -> torch.device:
    """'auto' is CUDA, else MPS, else the CPU. Raises SpecError when the named device is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    kind, _, index = name.partition(":")
    if not available[kind] or (index and int(index) >= torch.cuda.device_count()):
        usable = ", ".join(k for k, there in available.items() if there)
        raise SpecError(f"train.device {name!r} is not on this machine; use one of {usable}, or auto")
    return torch.device(name)


class Loop(abc.ABC):
    """A model with its inner optimizer, wherever its parameters lie: what one process and one of many have in common.

    Args:
        model: a causal language model, fp32.
        layout: canonical flat layout of its trainable parameters.
        spec: the run's spec (train, optimizer, model and run tables are used).
        device: where to train.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, spec: Spec, device: torch.device) -> None:
        self._train, self._optimizer_table, self._steps = spec.train, spec.optimizer, spec.run.steps
        self.device, self.layout = device, layout
        self._place(model)
        self.model = prepare_for_training(model, spec.model)
        self.model.train()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._bare = model
        self._optimizer = self._make_optimizer()
        self._autocast = self._cast(spec.train.precision == "bf16")
        self._warmup_from: tuple[int, int] | None = None

    @abc.abstractmethod
    def _place(self, model: torch.nn.Module) -> None:
        """Bring the model's parameters to where they are trained."""

    @abc.abstractmethod
    def _values(self) -> torch.Tensor:
        """The parameters that this process holds, as one fp32 vector."""

    @abc.abstractmethod
    def _set_values(self, values: torch.Tensor) -> None:
        """Undo `_values`."""

    def _make_optimizer(self) -> InnerOptimizer:
        return InnerOptimizer(self._bare, self._optimizer_table)

    def _cast(self, bf16: bool) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=True)

    def _clip(self, limit: float) -> torch.Tensor:
        """Scale the gradients to a global norm of at most `limit`; returns the norm before, a scalar."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, limit)

    def step(self, batch: NDArray[np.int64] | torch.Tensor, at: int, *, micro_batch_size: int | None = None) -> StepResult:
        """One local step.

        batch: token ids, int64, shape [sequences, sequence_length + 1]; at: the run's step (from 0), which sets the learning rate;
        micro_batch_size: sequences per forward pass, the spec's when left out."""
        tokens = torch.as_tensor(batch).to(self.device, non_blocking=True)
        size = micro_batch_size or self._train.micro_batch_size or tokens.shape[0]
        parts = torch.split(tokens, size)
        losses = []
        for part in parts:
            loss = self._loss(part) * (part.shape[0] / tokens.shape[0])
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        norm = self._clip(self._optimizer_table.clip_norm or float("inf"))
        factor = lr_factor(at, self._steps, self._optimizer_table) * self._rewarm(at)
        self._optimizer.step(factor)
        self._optimizer.zero_grad()
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return StepResult(loss, norm, tokens.shape[0] * (tokens.shape[1] - 1), self._optimizer_table.lr * factor)

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._autocast:
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def _rewarm(self, at: int) -> float:
        if self._warmup_from is None:
            return 1.0
        start, length = self._warmup_from
        return min(1.0, (at - start + 1) / length)

    def rewarm(self, at: int, length: int) -> None:
        """Warm the learning rate up again over `length` steps from the run's step `at`: for a joiner with fresh state."""
        self._warmup_from = (at, length) if length else None

    def reset_inner_state(self) -> None:
        """Begin with a fresh inner optimizer."""
        self._optimizer = self._make_optimizer()
        self._warmup_from = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and inner optimizer state: all that a cluster needs to go on bit for bit."""
        inner = {f"inner.{name}": tensor for name, tensor in self._optimizer.state_tensors().items()}
        warmup = torch.tensor(self._warmup_from or (0, 0), dtype=torch.int64)
        return {"parameters": self._values(), "warmup": warmup, **inner}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self._set_values(tensors["parameters"])
        start, length = tensors["warmup"].tolist()
        self._warmup_from = (start, length) if length else None
        self.load_inner_state(tensors)

    def load_inner_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a peer's inner optimizer state only (its moments and step counts)."""
        inner = {name.removeprefix("inner."): t for name, t in tensors.items() if name.startswith("inner.")}
        self._optimizer.load_state_tensors(inner)


class Trainer(Loop):
    """A whole model copy in one process; its parameters become views of one flat vector."""

    def _place(self, model: torch.nn.Module) -> None:
        self.flat = FlatParameters(model.to(self.device), self.layout)

    def _values(self) -> torch.Tensor:
        return self.flat.values.detach()

    def _set_values(self, values: torch.Tensor) -> None:
        self.flat.values.copy_(values)

    def read(self, start: int, stop: int) -> Floats:
        """Local parameters on [start, stop) of the flat layout, fp32 on the host. On the CPU a view, so copy it to keep it."""
        values: Floats = self.flat.values[start:stop].detach().cpu().numpy()
        return values

    def write(self, start: int, values: Floats) -> None:
        """Set the local parameters from position `start` of the flat layout on."""
        with torch.no_grad():
            self.flat.values[start : start + values.size].copy_(torch.from_numpy(values))


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, batches: list[NDArray[np.int64]], device: torch.device) -> float:
    """Mean loss in nats per token of a model over batches of token ids, int64, shape [sequences, sequence_length + 1], in fp32."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        tokens = torch.as_tensor(batch).to(device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        total += float(F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
        count += tokens[:, 1:].numel()
    model.train(was_training)
    return total / count
