"""TensorBoard event files of a run, for those who already look there. The records are metrics.jsonl's."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isles.errors import DataError
from isles.metrics import StepRecord

FIGURES = ("loss", "held_out_loss", "tokens", "bytes", "round", "lr", "grad_norm", "clusters")


class TensorBoard:
    """Writes event files into a folder; the folder appears with the first record. A resumed run hides the steps it repeats.

    All figures of a record make one event: written one by one they would cost a small model's training several times as much. Raises
    DataError when the folder cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, record: StepRecord) -> None:
        """One record; x is the step."""
        from tensorboardX.proto.summary_pb2 import Summary

        writer = self._writer or self._open(record.step)
        figures = [(name, getattr(record, name)) for name in FIGURES]
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in figures if value is not None]
        writer.add_summary(Summary(value=values), record.step)

    def _open(self, step: int) -> Any:
        from tensorboardX import FileWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        again = self._folder.exists()
        try:
            # A file is named after the second and the machine; without the step, a run resumed at once would write over its first part.
            self._writer = FileWriter(str(self._folder), flush_secs=5, filename_suffix=f".step-{step}")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise DataError(f"{self._folder} cannot be written ({reason}); free space or choose a writable folder") from error
        if again:  # TensorBoard then forgets what earlier files say of this step and later ones
            self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
        return self._writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
