"""What a run reports of itself: typed records, one JSON object a line.

Every command, picture and table reads these records and nothing else, so what is printed live and what is read back a
year later are the same figures. The file is plain JSON lines because it can be cut, tailed and read by anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

from isles.errors import DataError


@dataclass(frozen=True)
class StepRecord:
    """One local step of the run, over all clusters. Losses in nats per token; every count is since the run's start."""

    step: int  # local steps done by a cluster of full speed
    round: int  # rounds committed (all fragments together)
    tokens: int  # tokens trained, all clusters together
    loss: float  # training loss, mean over the clusters that trained
    held_out_loss: float | None  # of the global parameters, where it was measured
    bytes: int  # bytes that all clusters together would have sent over the internet
    lr: float  # inner learning rate
    grad_norm: float  # before clipping, mean over the clusters
    clusters: int  # clusters that trained in this step
    seconds: float  # wall time spent training, resumed parts included


@dataclass(frozen=True)
class Summary:
    """What is left of a run when it ended. `summary.json` holds exactly these fields."""

    name: str
    method: str  # diloco, ddp, single
    clusters: int
    local_steps: int  # H at the end of the run
    parameters: int  # trainable parameters of the model
    steps: int
    rounds: int
    tokens: int
    bytes: int  # sent by all clusters together
    loss: float  # training loss, mean of the last 20 records
    held_out_loss: float  # of the global parameters at the end, nats per token
    seconds: float
    tokens_per_second: float
    seed: int
    spec_digest: str  # blake3 of the spec
    complete: bool  # False when the run was interrupted


def to_json_line(record: StepRecord) -> str:
    return json.dumps(asdict(record), allow_nan=False)


def read_records(path: Path) -> Iterator[StepRecord]:
    """Read metrics.jsonl. A last line cut by a crash is left out; any other bad line raises DataError with its number."""
    names = {f.name for f in fields(StepRecord)}
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty, or was cut
        try:
            yield StepRecord(**{k: v for k, v in json.loads(line).items() if k in names})
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, line {number}, is no record of a run ({error}); remove the line or the run's folder") from error


class MetricsFile:
    """metrics.jsonl, appended to record by record. Every line reaches the operating system at once, so a crash of the process loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: StepRecord) -> None:
        self._file.write(to_json_line(record) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps than a checkpoint's, so that a resumed run writes each step once. Replaces the file in one move."""
        kept = [record for record in read_records(self.path) if record.step <= step]
        temporary = self.path.with_name(f".{self.path.name}.writing")
        temporary.write_text("".join(to_json_line(record) + "\n" for record in kept), encoding="utf-8")
        self._file.close()
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json in one move: a reader sees the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(asdict(summary), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_summary(path: Path) -> Summary:
    """Read summary.json. Raises DataError when it is missing or damaged."""
    names = {f.name for f in fields(Summary)}
    try:
        return Summary(**{k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k in names})
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: no run has ended there yet; name the --out of a finished `isles simulate`") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no summary of a run ({error}); resume the run to write it again") from error
