"""The outer state that an agent owns: global parameters, momentum, and what its cluster has handed off.

Global and handed-off parameters lie in the file that the workers have mapped; the momentum is the agent's own. A committed average is
applied chunk by chunk, so that nothing the size of the model is ever held besides. The digest of a fragment's global parameters
is taken in the same pass: equal digests on all clusters prove equal bits, round by round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from isles.codec import CHUNK_VALUES, Codec, check_encodable
from isles.errors import CheckpointError
from isles.model import Layout
from isles.outer import outer_optimizer
from isles.spec import OuterTable

Floats = NDArray[np.float32]


@dataclass
class FragmentState:
    """applied: the last round in the global parameters. digest: blake3 of their bytes."""

    applied: int
    digest: str


class OuterState:
    """Global parameters and momentum of a model.

    globals, sent: fp32, shape [layout.total], updated in place; `sent` is what the cluster handed off and has not seen averaged."""

    def __init__(
        self, layout: Layout, table: OuterTable, globals_: Floats, sent: Floats, residual: Floats | None = None
    ) -> None:
        self.layout, self.globals, self.sent, self.residual = layout, globals_, sent, residual
        self.optimizer = outer_optimizer(table, torch.from_numpy(globals_))
        self.fragments = [FragmentState(0, "") for _ in layout.fragments]
        self._aside: dict[int, Floats] = {}

    def move_to(self, globals_: Floats) -> None:
        """Keep the global parameters in another vector from now on, which takes their values over."""
        np.copyto(globals_, self.globals)
        self.globals = globals_
        self.optimizer.move_to([torch.from_numpy(globals_)])

    def begin(self, values: Floats) -> None:
        """Set the global parameters that a run begins with."""
        np.copyto(self.globals, values)
        self.refresh_digests()

    def refresh_digests(self) -> None:
        for index, (start, stop) in enumerate(self.layout.fragments):
            self.fragments[index].digest = digest(self.globals[start:stop])

    def encode(
        self, codec: Codec, fragment: int, first: int, stop: int, *, seed: int, out: memoryview | None = None
    ) -> memoryview:
        """Encode the contribution on values [first, stop) of a fragment: global minus handed-off parameters.

        Raises NonFiniteError. Safe in any thread; a codec with a residual must be asked once a round for every value."""
        start = self.layout.fragments[fragment][0]
        where = slice(start + first, start + stop)
        residual = None if self.residual is None else self.residual[where]
        return codec.encode(self.globals[where], self.sent[where], offset=start + first, seed=seed, residual=residual, out=out)

    def set_aside(self, fragment: int) -> None:
        """Encoding a contribution changes the residual: keep it as it is until the contribution is in a round."""
        if self.residual is not None:
            self._aside[fragment] = self.residual[slice(*self.layout.fragments[fragment])].copy()

    def settle(self, fragment: int, *, landed: bool) -> None:
        """A contribution is in a round, or stands for another one: then it will be encoded anew, from the residual that was."""
        kept = self._aside.pop(fragment, None)
        if kept is not None and not landed and self.residual is not None:
            self.residual[slice(*self.layout.fragments[fragment])] = kept

    def drop_residual(self) -> None:
        """Other parameters were taken over: nobody knows any more which rounds what is left out belongs to. It is lost, and nothing goes twice."""
        self._aside.clear()
        if self.residual is not None:
            self.residual[:] = 0

    def residual_before(self) -> Floats | None:
        """The residual without what is being encoded, fp32, shape [layout.total]."""
        if self.residual is None or not self._aside:
            return self.residual
        whole = self.residual.copy()
        for fragment, kept in self._aside.items():
            whole[slice(*self.layout.fragments[fragment])] = kept
        return whole

    def check(self, codec: Codec, fragment: int) -> None:
        """Whether what the cluster handed off can be encoded, before anybody is told of it. Raises NonFiniteError. Safe in any thread."""
        start, stop = self.layout.fragments[fragment]
        for first in range(start, stop, CHUNK_VALUES):
            where = slice(first, min(first + CHUNK_VALUES, stop))
            check_encodable(self.globals[where], self.sent[where], first, codec.name)

    def apply(self, fragment: int, number: int, chunks: Iterable[Floats], *, shift: bool) -> str:
        """The outer step of a committed round.

        chunks: the decoded average, consecutive, fp32, together the whole fragment. shift: the cluster's handed-off parameters are
        not in this round; they move along with the global ones, so that the progress in them stands for the next round.
        Returns the digest of the new global parameters."""
        start, stop = self.layout.fragments[fragment]
        state, hasher, at = self.fragments[fragment], blake3(), start
        if number != state.applied + 1:
            raise ValueError(f"round {number} of fragment {fragment} cannot follow round {state.applied}")
        for chunk in chunks:
            where = slice(at, at + chunk.size)
            old = self.globals[where].copy() if shift else None
            self.optimizer.step_range(at, at + chunk.size, chunk)
            if old is not None:
                self.sent[where] += self.globals[where] - old
            hasher.update(self.globals[where].view(np.uint8).data)
            at += chunk.size
        if at != stop:
            raise ValueError(f"the average of fragment {fragment} has {at - start} values instead of {stop - start}")
        state.applied, state.digest = number, hasher.hexdigest()
        return state.digest

    def tensors(self) -> dict[str, torch.Tensor]:
        """Global parameters and momentum for a checkpoint; they share memory with the state."""
        momentum = self.optimizer.state_dict()["buffers"]
        return {"values": torch.from_numpy(self.globals), **({"momentum": momentum[0]} if momentum else {})}

    def load(self, tensors: dict[str, torch.Tensor], applied: list[int]) -> None:
        """Take over `tensors` of the same run. Raises CheckpointError when they do not fit it."""
        values, momentum = tensors.get("values"), tensors.get("momentum")
        wanted = bool(self.optimizer.momentum)
        if (
            values is None
            or values.shape != (self.layout.total,)
            or len(applied) != len(self.fragments)
            or wanted != (momentum is not None)
        ):
            raise CheckpointError("the saved global parameters do not fit this run's model; they belong to another run")
        np.copyto(self.globals, values.numpy())
        if momentum is not None:
            self.optimizer.load_state_dict({"buffers": [momentum]})
        for fragment, number in zip(self.fragments, applied, strict=True):
            fragment.applied = number
        self.refresh_digests()


def digest(values: Floats) -> str:
    """blake3 of an fp32 vector's bytes."""
    hasher = blake3()
    for first in range(0, values.size, CHUNK_VALUES):
        hasher.update(values[first : first + CHUNK_VALUES].view(np.uint8).data)
    return hasher.hexdigest()


def chunk_bounds(size: int, chunk: int, index: int) -> tuple[int, int]:
    """Values [first, stop) of a fragment of `size` that make its chunk `index`."""
    return index * chunk, min((index + 1) * chunk, size)
