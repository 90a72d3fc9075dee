"""A transformers Trainer as a cluster of a run: `trainer.add_callback(isles.IslesCallback("alice.invite"))`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from isles.agent.cluster import Cluster
from isles.errors import UsageError


class IslesCallback(TrainerCallback):  # type: ignore[misc]
    """Joins when training begins, synchronises after every optimizer step, and has the Trainer stop when the run is over.

    Args:
        where, and the rest: as of `Cluster`.
        tokens_per_step: that a process trains in an optimizer step. When left out, the Trainer must count them
            (`include_num_input_tokens_seen` of its arguments).

    `cluster` is the `Cluster` while training goes on, None before and after. A Trainer that fails tells its callbacks nothing: the agent then stays
    until the script is started again, or for ten minutes after its process has ended. Give the Trainer as many `max_steps` as the run has: its
    schedule is stepped forward to where the run stands."""

    def __init__(self, where: Path | str, *, tokens_per_step: int | None = None, **terms: Any) -> None:
        self._where, self._tokens_per_step, self._terms = where, tokens_per_step, terms
        self.cluster: Cluster | None = None
        self._counted = 0
        self._loss, self._norm = math.nan, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        scheduler = given.get("lr_scheduler")
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's steps only with its optimizer
        self._counted = state.num_input_tokens_seen
        self.cluster = Cluster(given["model"], self._where, lr_scheduler=scheduler, **self._terms)
        self.cluster.__enter__()
        control.should_training_stop = not self.cluster.running

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        if self.cluster is None or not self.cluster.running:
            return
        try:
            self.cluster.step(loss=self._loss, tokens=self._tokens(state), grad_norm=self._norm)
        except BaseException as error:
            self._leave(error)
            raise
        control.should_training_stop = control.should_training_stop or not self.cluster.running

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **given: Any) -> None:  # noqa: ARG002
        self._loss = float((logs or {}).get("loss", self._loss))
        self._norm = float((logs or {}).get("grad_norm", self._norm))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.__exit__(None if error is None else type(error), error, None)

    def _tokens(self, state: Any) -> int:
        """Trained by this process since the last step. Raises UsageError when nobody counts them."""
        if self._tokens_per_step is not None:
            return self._tokens_per_step
        counted, self._counted = state.num_input_tokens_seen - self._counted, state.num_input_tokens_seen
        if counted <= 0:
            raise UsageError(
                "the Trainer does not count tokens, by which contributions are weighed; "
                "set include_num_input_tokens_seen in its arguments, or give IslesCallback tokens_per_step"
            )
        return int(counted) // (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)
