"""When a cluster saves its outer state, and what it keeps of the past.

Averages are kept since the checkpoint before the newest, for those who missed a few rounds. While somebody fetches a checkpoint, that
one stays, with all averages since: a joiner whose line is slow needs them when it is done. They stay until they are twice as large as the
checkpoint: a line over which it cannot come in the time in which that much is exchanged is too slow for the run in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from isles.agent.journal import Journal
from isles.agent.state import OuterState
from isles.errors import CheckpointError
from isles.exchange import Exchange
from isles.exchange.state import TENSORS
from isles.worker.checkpoint import CheckpointStore

ROUNDS = 8  # of a fragment, after which the outer state is saved at the latest


class Saving:
    """Args:
    every: steps between two checkpoints; 0: as seldom as can be. step: of the checkpoint that was loaded. wanted: steps of those that others are
    fetching.
    """

    def __init__(
        self, state: OuterState, checkpoints: CheckpointStore, journal: Journal, exchange: Exchange, *, every: int, step: int,
        wanted: Callable[[], Sequence[int]],
    ) -> None:  # fmt: skip
        self._state, self._checkpoints, self._journal, self._exchange = state, checkpoints, journal, exchange
        self._every, self._step, self._wanted = every, step, wanted
        self._kept_from = [f.applied for f in state.fragments]  # rounds in the checkpoint before the newest

    def due(self, fragment: int, number: int, step: int) -> bool:
        """Whether to save now that a round is applied, at this step of the run."""
        return bool(self._every and step - self._step >= self._every) or number - self._kept_from[fragment] >= ROUNDS

    async def save(self, step: int) -> None:
        """Save the outer state, which nobody may change meanwhile, and forget what nobody needs. Raises CheckpointError, DiskError."""
        applied = [f.applied for f in self._state.fragments]
        self._step = max(step, self._step)
        tensors = {"global": self._state.tensors()}
        if (residual := self._state.residual_before()) is not None:
            tensors["residual"] = {"residual": torch.from_numpy(residual)}
        state = {"applied": applied, "digests": [f.digest for f in self._state.fragments]}
        spare = self._for_joiners()
        await asyncio.to_thread(self._checkpoints.save, self._step, state, tensors, spare=list(spare))
        before = [min(rounds) for rounds in zip(self._kept_from, *spare.values(), strict=True)]
        self._journal.trim([min(a, b) for a, b in zip(before, applied, strict=True)])
        for fragment, number in enumerate(before):
            self._exchange.forget(fragment, number)
        self._kept_from = applied

    def _for_joiners(self) -> dict[int, list[int]]:
        """The rounds of each checkpoint that has to stay because it is being fetched, by its step."""
        spare = {}
        for step in self._wanted():
            try:
                record = self._checkpoints.describe(step)
            except CheckpointError:
                continue
            rounds = [int(n) for n in record.state["applied"]]
            since = sum(self._exchange.averages.size_since(fragment, number) for fragment, number in enumerate(rounds))
            if since <= 2 * record.files[TENSORS]["bytes"]:
                spare[step] = rounds
        return spare
