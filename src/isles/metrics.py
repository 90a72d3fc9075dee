"""What a run reports of itself: typed records, one JSON object a line.

Every command, picture and table reads these records and nothing else, so what is printed live and what is read back a
year later are the same figures. The file is plain JSON lines because it can be cut, tailed and read by anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isles.errors import DataError
from isles.files import write_whole


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
    codec: str = ""  # of the contributions; empty where nothing is encoded, and in files of before it was recorded


def to_json_line(record: StepRecord) -> str:
    """The record as its line of metrics.jsonl, without the newline. Raises ValueError for NaN and infinity, which are no JSON."""
    return json.dumps(asdict(record), allow_nan=False)


def read_records(path: Path) -> Iterator[StepRecord]:
    """Read metrics.jsonl. A last line cut by a crash is left out; any other bad line raises DataError with its number.

    Keys that this version does not know are passed over, so that a later version's files can be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # the process died while it wrote this
                yield _record(path, number, line)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({_reason(error)}); name the --out of a run that has begun") from error


def _record(path: Path, number: int, line: bytes) -> StepRecord:
    try:
        return StepRecord(**_known(StepRecord, _parse(line)))
    except ValueError as error:
        raise DataError(
            f"{path}, line {number}, is no record of a run ({error}); remove the line or the run's folder"
        ) from error


def _parse(text: bytes) -> dict[str, Any]:
    """The one JSON object in `text`. Raises ValueError, for the NaN and Infinity that Python's json takes as well."""

    def refuse(name: str) -> None:
        raise ValueError(f"it holds {name}")

    value = json.loads(text, parse_constant=refuse)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _known(kind: type[StepRecord] | type[Summary], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind` among what was read, each of its declared type. Raises ValueError that names the field."""
    values = {}
    for name, allowed in _TYPES[kind]:
        if name not in given:
            if name in _OPTIONAL:
                continue
            raise ValueError(f"it has no {name}")
        value = given[name]
        if type(value) not in allowed:
            raise ValueError(f"its {name} is {json.dumps(value)[:40]}")
        values[name] = float(value) if type(value) is int and float in allowed else value
    return values


# What json gives for a field's annotation. A float without a fraction may have been written as an integer by another program.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "str": (str,),
    "bool": (bool,),
}
_OPTIONAL = {f.name for f in fields(Summary) if f.default is not MISSING}
_TYPES = {kind: [(f.name, _JSON_TYPES[str(f.type)]) for f in fields(kind)] for kind in (StepRecord, Summary)}


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


class MetricsFile:
    """metrics.jsonl, appended to record by record. Every line reaches the operating system at once, so a crash of the process loses none.

    Raises DataError when the file cannot be written. NaN and infinity are never written: `append` raises ValueError for them and leaves
    the file as it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _drop_cut_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"{self.path} cannot be written ({_reason(error)}); free space or choose a writable folder")

    def append(self, record: StepRecord) -> None:
        rest = memoryview((to_json_line(record) + "\n").encode())
        try:
            while rest:  # a full disk may take a part of it before it says so
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._unwritable(error) from error

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps than a checkpoint's, so that a resumed run writes each step once. Replaces the file in one move."""
        kept = [record for record in read_records(self.path) if record.step <= step]
        self._file.close()
        try:
            write_whole(self.path, "".join(to_json_line(record) + "\n" for record in kept).encode())
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _drop_cut_line(path: Path) -> None:
    """Take away what follows the last newline: an append to a line that a crash cut would spoil both."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json in one move. Raises DataError when it cannot be written, ValueError for NaN and infinity."""
    text = json.dumps(asdict(summary), indent=1, allow_nan=False) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise DataError(f"{path} cannot be written ({_reason(error)}); free space or choose a writable folder") from error


def read_summary(path: Path) -> Summary:
    """Read summary.json. Raises DataError when it is missing or damaged."""
    try:
        return Summary(**_known(Summary, _parse(path.read_bytes())))
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist: no run has ended there yet; name the --out of a finished `isles simulate`"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({_reason(error)}); name the --out of a finished `isles simulate`") from error
    except ValueError as error:
        raise DataError(f"{path} is no summary of a run ({error}); resume the run to write it again") from error
