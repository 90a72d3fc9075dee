"""TensorBoard event files of a run, for those who already look there. The records are metrics.jsonl's."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isles.metrics import StepRecord

_FIGURES = ("loss", "held_out_loss", "tokens", "bytes", "round", "lr", "grad_norm", "clusters")


class TensorBoard:
    """Writes event files into a folder; the folder appears with the first record. A resumed run hides the steps it repeats."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, record: StepRecord) -> None:
        """One record; x is the step."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=record.step if self._folder.exists() else None, flush_secs=5)
        for name in _FIGURES:
            value = getattr(record, name)
            if value is not None:
                self._writer.add_scalar(name, value, record.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
